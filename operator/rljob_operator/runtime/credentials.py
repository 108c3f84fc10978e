"""Where the API server is and who we are: the pod's service account, or a kubeconfig."""

from __future__ import annotations

import os

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

POOL = 128
"""Connections to the API server; creates, polls and watches share them."""


async def configuration() -> Configuration:
    """Return the client's configuration: KUBECONFIG if set, else the pod's service account, else ~/.kube/config.

    Raises kubernetes.aio.config.ConfigException when there is none. A service account's token is read again as it is renewed.
    """
    result = Configuration()
    if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=result)
    else:
        await config.load_kube_config(client_configuration=result)
    result.connection_pool_maxsize = POOL
    return result

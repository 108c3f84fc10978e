"""Settings from the environment: defaults, every variable of the table, refusals that name variable, rule and value."""

import re

import pytest

from rljob_operator.runtime import settings
from rljob_operator.runtime.settings import PREFIX, SettingError, Settings


def test_nothing_set_gives_the_defaults():
    got = Settings.from_env({})
    assert (got.workers, got.lease_seconds, got.watch_namespaces, got.log_format) == (16, 15.0, (), "json")
    assert got.config.namespace == "rljob-system"
    assert got.config.images == {}


def test_every_field_can_be_set():
    env = {
        "NAMESPACE": "sys",
        "WATCH_NAMESPACES": "a, b",
        "IDENTITY": "me",
        "IMAGE_ACTOR": "i/actor:1",
        "IMAGE_ENV": "i/env:1",
        "IMAGE_PULL_POLICY": "Always",
        "METRICS_NAMESPACE_LABELS": "team=ops,x=y",
        "DNS_NAMESPACE_LABELS": "kubernetes.io/metadata.name=openshift-dns",
        "DNS_POD_LABELS": "dns=default",
        "DNS_CIDRS": "192.0.2.53/32,169.254.20.10/32",
        "WORKERS": "4",
        "LEASE_SECONDS": "7.5",
        "LEADER_ELECT": "false",
        "METRICS_PORT": "0",
        "LOG_FORMAT": "text",
    }
    got = Settings.from_env({PREFIX + name: value for name, value in env.items()})
    assert got.watch_namespaces == ("a", "b")
    assert (got.identity, got.workers, got.lease_seconds, got.leader_elect, got.metrics_port) == (
        "me",
        4,
        7.5,
        False,
        0,
    )
    assert got.config.images == {"actor": "i/actor:1", "env": "i/env:1"}
    assert got.config.metrics_namespace_labels == {"team": "ops", "x": "y"}
    assert got.config.dns_namespace_labels == {"kubernetes.io/metadata.name": "openshift-dns"}
    assert got.config.dns_pod_labels == {"dns": "default"}
    assert got.config.dns_cidrs == ("192.0.2.53/32", "169.254.20.10/32")
    assert Settings.from_env({f"{PREFIX}DNS_CIDRS": "none"}).config.dns_cidrs == ()
    assert (got.config.image_pull_policy, got.config.namespace) == ("Always", "sys")


def test_two_replicas_on_one_machine_have_different_identities():
    assert Settings.from_env({}).identity != Settings.from_env({}).identity


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKERS", "0"),
        ("WORKERS", "many"),
        ("LEASE_SECONDS", "-1"),
        ("LEASE_SECONDS", "nan"),
        ("LEADER_ELECT", "yes"),
        ("LOG_LEVEL", "LOUD"),
        ("METRICS_NAMESPACE_LABELS", "team"),
        ("DNS_CIDRS", "dns.example.com"),
        ("WATCH_NAMESPACES", "rljob-system"),
    ],
)
def test_a_wrong_value_is_refused_by_name_and_value(name, value):
    with pytest.raises(SettingError, match=f"{PREFIX}{name} must (be|not name) .*got {re.escape(repr(value))}"):
        Settings.from_env({PREFIX + name: value})


def test_every_variable_read_is_in_the_table():
    class Watched(dict):
        def get(self, key, default=None):
            self[key] = default
            return default

    env = Watched()
    Settings.from_env(env)
    table = set(re.findall(r"[A-Z_]{5,}", re.sub(r"RLJOB_OPERATOR_", "", settings.__doc__)))
    assert {name.removeprefix(PREFIX) for name in env} <= table

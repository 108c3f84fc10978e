"""Remote calls between processes: ROUTER/DEALER, deadlines, typed errors, executed at most once.

    server = RpcServer("tcp://127.0.0.1:0", {"add": lambda a, b: a + b}).start()
    client = RpcClient(server.address)
    assert client.call_sync("add", 1, 2) == 3

Messages, by kind (client -> server unless noted): `hello` and `attach` open a connection, `welcome`, `who` and `refused`
answer (server); `call`, `cancel`, `bye`; `reply`, `error`, `received` (server); `ping` (server) finds out who is gone; `release`
gives shared memory back to the server. Every message carries the sender's epoch. Several small messages may share a frame
(`message_batches`).
"""

from rl_core.transports.rpc_client import RpcClient
from rl_core.transports.rpc_incoming import IncomingCall, Peer
from rl_core.transports.rpc_server import RpcServer, inline, scheduling
from rl_core.transports.rpc_wire import current_caller, current_caller_host

__all__ = [
    "IncomingCall",
    "Peer",
    "RpcClient",
    "RpcServer",
    "current_caller",
    "current_caller_host",
    "inline",
    "scheduling",
]

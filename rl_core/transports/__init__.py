"""How processes talk: frames (codec), curve (keys), sockets (the I/O thread), shared_memory, rpc and bulk streams."""

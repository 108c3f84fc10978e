"""Worker processes, their groups, the hub that knows who is alive, the supervisor."""

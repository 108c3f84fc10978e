"""Worker processes: their groups, the hub that keeps track of live members, and the supervisor of a pod."""

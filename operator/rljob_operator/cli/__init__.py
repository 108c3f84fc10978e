"""The cluster's side of the `rljob` command; found by the entry points `rljob.commands` and `rljob.targets`."""

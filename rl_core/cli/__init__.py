"""The rljob command."""

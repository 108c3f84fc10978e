"""The one error that callers of this package catch."""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the text says why and what helps."""

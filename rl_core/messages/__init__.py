"""Every record that crosses between processes, by subject. Pure data: no torch, no sockets; any layer above `api` may import it.

A message is a `@record`: a frozen dataclass that the codec knows by name. Arrays and tensors are annotated by name only. What a
user's data set or environment puts into a sample stays a mapping of the user's own keys; everything else is a field with a name.
"""

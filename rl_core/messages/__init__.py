"""The records that processes exchange, by subject. They are pure data without torch or sockets, and any layer above `api` may import them.

A message is a `@record`: a frozen dataclass that the codec knows by name. Annotations name arrays and tensors without importing their
types. Values from a user's data set or environment stay in a mapping with the user's keys; all others are fields.
"""

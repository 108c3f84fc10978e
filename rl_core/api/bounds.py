"""Bounded types of the job schema: every string, list and map has a limit, so that the API server can bound the cost of CEL rules.

Strings without a limit of their own have `STRING_LIMIT` (base.py). Patterns are written in the subset that Python's `re` and Go's
RE2 read alike, because both check them.
"""

from typing import Annotated

from pydantic import Field

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of an object, container or volume."""
Names = Annotated[list[Name], Field(max_length=16)]
EnvMap = Annotated[dict[Annotated[str, Field(max_length=128)], str], Field(max_length=64)]
"""Environment variables."""
LabelMap = Annotated[
    dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]], Field(max_length=32)
]
"""Labels or a node selector."""
AnnotationMap = Annotated[dict[Annotated[str, Field(max_length=317)], str], Field(max_length=32)]
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
Quantity = Annotated[int, Field(ge=0)] | Annotated[str, Field(max_length=32, pattern=QUANTITY_PATTERN)]
"""Amount of a resource: a whole number, or text such as 500m or 2Gi."""
ResourceMap = Annotated[dict[Annotated[str, Field(max_length=253)], Quantity], Field(max_length=16)]
Seconds = Annotated[int, Field(ge=1, lt=2**31)]
Port = Annotated[int, Field(ge=1, le=65535)]

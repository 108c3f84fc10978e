"""What exists only to be quick on a CPU: no part of the mathematics, and of no use on an accelerator.

`machine`: which library of torch multiplies matrices faster here. `products`: the generating forward's products.
`tuning`: the door for a process that trains; behind it `linear` (its linear layers) and `memory` (its freed memory).
"""

"""Optimizations for CPUs. They do not change results beyond rounding and are not used on accelerators.

`machine`: which library of torch multiplies matrices faster here. `products`: the generating forward's products.
`tuning`: applies the optimizations to a process that trains: `linear` (its linear layers) and `memory` (its freed memory).
"""

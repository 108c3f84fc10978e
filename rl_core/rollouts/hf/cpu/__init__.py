"""What the lean forward does only to be quick on a CPU: no part of the mathematics, and of no use on an accelerator.

`products`: which library of torch computes a matrix product, and rows padded to sizes that it has code for.
`rope`: rotation as one complex product, for which query and key weights are stored interleaved.

Callers: `decoder` (products, padded rows, rotation table) and `weights`, which interleaves what a sync brings.
"""

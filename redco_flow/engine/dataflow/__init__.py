"""What a function does with each dim of its parameters, read off its jaxpr.

`atoms` says which dims are the same, `trace` walks the jaxpr, the handler modules know one idea
each (`elementwise`, `shaping`, `indexing`, `products`, `reductions`, `calls`). No name of a
parameter is ever looked at; meshes and rules are not known here.
"""

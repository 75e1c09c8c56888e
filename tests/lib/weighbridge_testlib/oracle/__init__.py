"""The real tools as judges: each writes what its users get, says what is in it, and loads what we took out of it.

    python -m weighbridge_testlib.oracle GROUP FOLDER     CASE/made, CASE/told.json, CASE/want.safetensors, ...

A group is one process: it imports its tools once and no test process ever holds them. `made` is what we look at; what
the tool says of it is in `told.json` (see `told.Told`), its tensors are in `want.safetensors`. A case whose tool fails
leaves `failed.txt`, which its tests show.
"""

"""The modules that every other package of `offload` imports, and that import none of them.

Errors and the logger; the config and its budget of host bytes; locks, tickets and the host memory
pool; metrics and the timeline; facts about the host and its drives; strict readers of small files.
`errors`, `config`, `host_facts`, `strict_json` and what they import need no torch, so that
`offload doctor` can say that torch is broken and `offload verify` runs anywhere.
"""

"""Merge adapters into their base over safetensors files, at disk speed and in constant memory.

adapter, base    what the two folders hold
plan             from headers alone: one step for every tensor of the result, or the refusals
preview          what `registry merge --dry-run` says
bundle           the files beside the weights: config, tokenizer, chat template
block            the arithmetic of one block of rows
stream, journal  write the shards, hash them on the way, go on after a kill
proof            read the written files again and prove them
job              the child process's part; start, the parent's
behave           what the result computes, compared with base and adapter; behave_job, the child's part
outside          what PEFT's own layers compute: planned, done in a jail, looked through; peft_job, the child's part
"""

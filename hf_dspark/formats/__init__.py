"""Published drafter layouts: recognised, read, described and written.

Contract: `detect` says from a config (and tensor names) which layout a folder has, or refuses; a reader for each
layout puts its config into `DSparkConfig` terms and its tensor names into ours. `loading`, `description` and `convert`
work on that, header by header and tensor by tensor. Nothing here knows about decoding, and only `plan` the model.
"""

"""Checkpoints and outputs that are elsewhere: hf://, s3://, gs://, az://, https://, sftp://.

Their names and sizes are known from a listing. A folder of sparse files stands for them, in which
the other packages find checkpoints as in any folder; headers are fetched with the listing and
tensors when they are read.

    scratch   the folder: what is in it, what has been fetched, how much it may hold
    places    a URL's files
    streamed  safetensors files that do not fit into it, read through it in blocks
    hub       revisions on the Hugging Face hub, through its own cache
    upload    outputs
"""

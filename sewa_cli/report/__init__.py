"""The JSON report: what was chosen, from what, how good it is, what it cost, and how to rebuild it.

`sewa schema` prints the JSON Schema. A change that drops or renames a key raises SCHEMA_VERSION.
A module for each command's report; import from them, so that nobody waits for the models of others.
"""

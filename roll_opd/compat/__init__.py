"""Translation of Trinity-RFT's configurations and of ROLL's `pg_variant`; imported only for files that need it.

ROLL's other keys need no translation, because `config.schema` declares these keys under ROLL's names.
`config.roll_keys` lists keys without effect, refused keys, and ROLL's names for parts.
"""

"""Translation of Trinity-RFT's configurations, and of ROLL's key `pg_variant`.

This package is imported only for files that need it. ROLL's other keys need no translation, because `config.schema`
declares them under the names that ROLL uses. `config.roll_keys` lists the keys of ROLL that have no effect here, the
keys that are refused, and the parts that have another name in ROLL.
"""

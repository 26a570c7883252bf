"""Commands as Spark applications: each module is a script for `spark-submit`.

They are part of the package, so that an operator finds them wherever it is installed. Exit codes are those of
`cdc_replay.spark.exit_codes`.
"""

"""Assets, connections, operators and Params with which Airflow runs the pipeline.

Parsing a DAG file is a hot path: nothing here imports Spark, Arrow, psycopg or Great Expectations at module
level. Operators import `cdc_replay.commands` when they execute.
"""

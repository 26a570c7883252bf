"""What Airflow needs to run the pipeline: assets, connections, operators and the Params of the manual DAGs.

Parsing a DAG file is a hot path: nothing here imports Spark, Arrow, psycopg or Great Expectations at module
level. Operators import `cdc_replay.commands` when they execute.
"""

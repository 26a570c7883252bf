"""The pipeline's DAGs, one class each. `dags/*.py` make them for all that the configuration names.

A class takes the name of its object, and any argument of Airflow's `DAG`, which overrides ours: another
`dag_id`, `schedule`, `default_args` (pool, owner, callbacks), `tags`. Made in a DAG file, it is found by
Airflow, also without a variable.

Airflow parses each DAG file in a process of its own, again and again. So classes are in modules by what they
import: Spark's provider and Airflow's models take a quarter of a second each.
"""

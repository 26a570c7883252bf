"""One module per verb, with a function that the command line, the DAGs and the tests call.

A verb opens what the configuration names (`opening`) and makes one call into a stage or the engine. Those
depend neither on the configuration nor on Airflow, nor on the stages above them.
"""

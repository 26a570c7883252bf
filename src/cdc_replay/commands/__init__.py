"""One module per verb, one public function each: what the command line, the DAGs and the tests call.

The stages know nothing of each other, of the configuration or of Airflow; here they are put in order.
"""

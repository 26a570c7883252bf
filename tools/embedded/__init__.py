"""PostgreSQL, Java and Airflow from packages, for the demo and the tests. Not part of the product."""

"""The plugin's application: the page in Airflow's menu, its data, and the reports of validations.

    page.html, page.js ──▶ /data, /subscriptions/NAME     what the servers and Airflow's database say
                       ──▶ Airflow's own REST API         a button triggers a DAG, as the user

Airflow does not protect the applications of plugins. Every route here requires a valid token, as a header or
as the UI's cookie, and shows only objects whose DAG the user may read (`access`).

| object                         | DAG                       |
|--------------------------------|---------------------------|
| a publisher                    | `capture__<publisher>`    |
| a subscription, its tables     | `validate__<subscription>`|
| the report of a validation     | `validate__<subscription>`|
| the last replay run of a group | `replay__<group>`         |

Nothing here changes anything. A button is shown to those who may trigger its DAG; Airflow's API checks that
again, and the Params, and writes its audit log.
"""

"""The pipeline's tasks: each is one command of the library.

| module       | tasks                                                                                  |
|--------------|----------------------------------------------------------------------------------------|
| `in_process` | light commands, in the task's own process: setup, capture, watch, validate             |
| `spark`      | Spark applications, `cdc_replay.jobs`, on the group's Spark connection                  |
| `warm_spark` | the same in the task's own process, on a running Spark Connect server                  |
| `report`     | the result of a replay for one subscription                                            |
| `failures`   | which errors are retried, and what the task's exception says                           |

Every command may be killed and run again at any point: it continues from what is durable.
"""

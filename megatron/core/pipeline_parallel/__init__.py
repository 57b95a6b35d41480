"""Pipeline parallelism: schedules as data, one executor that runs them, messages between stages."""

"""Transports for task queues: `nsqext.integrations.celery` and `nsqext.integrations.taskiq`."""

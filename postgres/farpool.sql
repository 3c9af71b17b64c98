-- What is cached, by relation, and pins. To be run in each database by a superuser, with the path by which
-- shared_preload_libraries names the module:
--
--   psql -v module=/usr/local/lib/farpool/libfarpool_postgres.so -f farpool.sql

CREATE SCHEMA IF NOT EXISTS farpool;

CREATE OR REPLACE FUNCTION farpool.cached_files() RETURNS json
  AS :'module', 'farpool_cached_files' LANGUAGE C VOLATILE;
CREATE OR REPLACE FUNCTION farpool.set_pinned(database oid, filenode oid, pinned boolean) RETURNS integer
  AS :'module', 'farpool_set_pinned' LANGUAGE C VOLATILE STRICT;
REVOKE ALL ON FUNCTION farpool.cached_files() FROM PUBLIC;
REVOKE ALL ON FUNCTION farpool.set_pinned(oid, oid, boolean) FROM PUBLIC;

-- The relations of this database, those with most pages first. No row: none is cached, or the cache is closed.
CREATE OR REPLACE VIEW farpool.cache AS
  SELECT pg_filenode_relation(0, file.filenode) AS relation,
         sum(file.pages)::bigint AS pages,
         pg_size_pretty(sum(file.pages) * 8192) AS size,
         bool_or(file.pinned) AS pinned
  FROM json_to_recordset(farpool.cached_files())
       AS file(database oid, filenode oid, fork boolean, pages bigint, pinned boolean)
  WHERE file.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  GROUP BY file.filenode
  ORDER BY sum(file.pages) DESC;
REVOKE ALL ON farpool.cache FROM PUBLIC;

-- Keep the pages of a table or an index while others are evicted. Returns how many of its files are pinned: only
-- those of which pages are cached. To load a relation first: SELECT pg_prewarm('name', 'read').
CREATE OR REPLACE FUNCTION farpool.pin(relation regclass) RETURNS integer LANGUAGE sql AS $$
  SELECT farpool.set_pinned(oid, pg_relation_filenode(relation), true)
  FROM pg_database WHERE datname = current_database()
$$;
CREATE OR REPLACE FUNCTION farpool.unpin(relation regclass) RETURNS integer LANGUAGE sql AS $$
  SELECT farpool.set_pinned(oid, pg_relation_filenode(relation), false)
  FROM pg_database WHERE datname = current_database()
$$;
REVOKE ALL ON FUNCTION farpool.pin(regclass), farpool.unpin(regclass) FROM PUBLIC;

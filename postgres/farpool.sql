-- What is cached, by relation; pins; and the server's own buffers, which a standby can load. To be run in each database
-- by a superuser, with the path by which shared_preload_libraries names the module:
--
--   psql -v module=/usr/local/lib/farpool/libfarpool_postgres.so -f farpool.sql

\set ON_ERROR_STOP on
\if :{?module}
\else
  \warn 'name the module: psql -v module=/usr/local/lib/farpool/libfarpool_postgres.so -f farpool.sql'
  \quit
\endif

BEGIN;
-- Names below mean what PostgreSQL itself has, whatever other users have made.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Otherwise a user who had made the schema, or something in it, could change what superusers run here later.
DO $$
BEGIN
  IF EXISTS (SELECT FROM (SELECT oid AS namespace, nspowner AS owner FROM pg_namespace
                          UNION ALL SELECT pronamespace, proowner FROM pg_proc
                          UNION ALL SELECT relnamespace, relowner FROM pg_class) AS object
             WHERE namespace = (SELECT oid FROM pg_namespace WHERE nspname = 'farpool')
               AND owner NOT IN (SELECT oid FROM pg_roles WHERE rolsuper)) THEN
    RAISE EXCEPTION 'the schema farpool or something in it belongs to a user who is no superuser: drop it first';
  END IF;
END
$$;
CREATE SCHEMA IF NOT EXISTS farpool;

CREATE OR REPLACE FUNCTION farpool.cached_files() RETURNS json
  AS :'module', 'farpool_cached_files' LANGUAGE C VOLATILE;
CREATE OR REPLACE FUNCTION farpool.set_pinned(database oid, filenode oid, pinned boolean) RETURNS integer
  AS :'module', 'farpool_set_pinned' LANGUAGE C VOLATILE STRICT;
REVOKE ALL ON FUNCTION farpool.cached_files() FROM PUBLIC;
REVOKE ALL ON FUNCTION farpool.set_pinned(oid, oid, boolean) FROM PUBLIC;

-- The relations of this database in the tablespace pg_default (1663: only its files are cached), those with most pages
-- first. No row: nothing is cached, or the cache is closed. A relation counts as pinned if all of its segments are.
CREATE OR REPLACE VIEW farpool.cache AS
  SELECT pg_filenode_relation(1663::oid, file.filenode) AS relation,
         sum(file.pages)::bigint AS pages,
         pg_size_pretty(sum(file.pages) * 8192::numeric) AS size,
         coalesce(bool_and(file.pinned) FILTER (WHERE NOT file.fork), false) AS pinned
  FROM json_to_recordset(farpool.cached_files())
       AS file(database oid, filenode oid, fork boolean, pages bigint, pinned boolean)
  WHERE file.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  GROUP BY file.filenode
  ORDER BY sum(file.pages) DESC;
REVOKE ALL ON farpool.cache FROM PUBLIC;

-- Keep the pages of a table or an index while others are evicted. Returns how many of its files are pinned: those of
-- which a page was read since the cache was attached. To load a relation first: SELECT pg_prewarm('name', 'read').
-- Null: it has no file of its own (a view, a partitioned table), or lies in another tablespace than pg_default. The
-- table's TOAST table and indexes are relations of their own.
CREATE OR REPLACE FUNCTION farpool.pin(relation regclass, pinned boolean DEFAULT true) RETURNS integer
  LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
  SELECT farpool.set_pinned(database.oid, pg_relation_filenode(class.oid), pinned)
  FROM pg_class AS class, pg_database AS database
  WHERE class.oid = relation AND database.datname = current_database()
    AND coalesce(nullif(class.reltablespace, 0), database.dattablespace) = 1663
$$;
CREATE OR REPLACE FUNCTION farpool.unpin(relation regclass) RETURNS integer
  LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$ SELECT farpool.pin(relation, false) $$;
REVOKE ALL ON FUNCTION farpool.pin(regclass, boolean), farpool.unpin(regclass) FROM PUBLIC;

-- PostgreSQL's own buffers over a planned switchover: the old primary notes which pages of this database are in its
-- buffers, and the standby, which has the note by replication, loads them before its promotion. Both need the extensions
-- pg_buffercache and pg_prewarm.
CREATE TABLE IF NOT EXISTS farpool.buffers (relation regclass NOT NULL, first bigint NOT NULL, last bigint NOT NULL);
REVOKE ALL ON farpool.buffers FROM PUBLIC;

-- The schema of an extension, quoted.
CREATE OR REPLACE FUNCTION farpool.schema_of(extension text) RETURNS text
  LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  schema text := (SELECT quote_ident(nspname) FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace
                  WHERE extname = extension);
BEGIN
  IF schema IS NULL THEN
    RAISE EXCEPTION 'the extension % is missing: CREATE EXTENSION %', extension, extension;
  END IF;
  RETURN schema;
END
$$;

-- Returns how many pages were noted: those of permanent tables and indexes, without free space and visibility maps.
CREATE OR REPLACE FUNCTION farpool.note_buffers() RETURNS bigint
  LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
  DELETE FROM farpool.buffers;
  EXECUTE format('
    INSERT INTO farpool.buffers
      SELECT relation, min(block), max(block)
      FROM (SELECT class.oid AS relation, buffer.relblocknumber AS block,
                   -- The same number for pages that follow each other.
                   buffer.relblocknumber
                     - row_number() OVER (PARTITION BY class.oid ORDER BY buffer.relblocknumber) AS run
            FROM %s.pg_buffercache AS buffer
            JOIN pg_database AS database ON database.oid = buffer.reldatabase
            JOIN pg_class AS class ON pg_relation_filenode(class.oid) = buffer.relfilenode
             AND coalesce(nullif(class.reltablespace, 0), database.dattablespace) = buffer.reltablespace
            WHERE database.datname = current_database() AND buffer.relforknumber = 0 AND class.relpersistence = ''p'')
           AS pages
      GROUP BY relation, run', farpool.schema_of('pg_buffercache'));
  RETURN (SELECT coalesce(sum(last - first + 1), 0) FROM farpool.buffers);
END
$$;

-- Returns how many pages were loaded. Relations that are gone or have become shorter are no error.
CREATE OR REPLACE FUNCTION farpool.load_buffers() RETURNS bigint
  LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
  loaded bigint;
BEGIN
  EXECUTE format('
    SELECT coalesce(sum(%s.pg_prewarm(relation, ''buffer'', ''main'', first, least(last, blocks - 1))), 0)
    FROM (SELECT *, pg_relation_size(relation) / current_setting(''block_size'')::integer AS blocks
          FROM farpool.buffers) AS noted
    WHERE first < blocks', farpool.schema_of('pg_prewarm')) INTO loaded;
  RETURN loaded;
END
$$;
REVOKE ALL ON FUNCTION farpool.schema_of(text), farpool.note_buffers(), farpool.load_buffers() FROM PUBLIC;
COMMIT;

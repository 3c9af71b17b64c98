//! The relations of a PostgreSQL server to which files belong, as the running server says.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use farpool_cache::RelationFile;
use postgres::{Client, Config, NoTls};

use crate::errors::describe;
use crate::output::complain;
use crate::users;

/// The oid of the tablespace `pg_default`, whose files lie below `base/`.
const DEFAULT_TABLESPACE: u32 = 1663;
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
const ANSWER_WITHIN: Duration = Duration::from_secs(15);
const OPTIONS: &str = "-c statement_timeout=5s -c search_path=pg_catalog";
/// Databases to which a client can connect to list the others.
const COMMON_DATABASES: [&str; 2] = ["postgres", "template1"];

/// As [`names`], but does not wait for a server that hangs.
pub fn names_in_time(data: &Path, paths: Vec<PathBuf>) -> Result<HashMap<PathBuf, String>> {
    let (answer, answered) = mpsc::sync_channel(1);
    let data = data.to_owned();
    // If it does not end, it ends with this process.
    std::thread::spawn(move || {
        let _ = answer.send(names(&data, paths)); // nobody listens: it took too long
    });
    answered.recv_timeout(ANSWER_WITHIN).unwrap_or_else(|_| {
        bail!("the server does not answer within {} s: leave out --relations", ANSWER_WITHIN.as_secs())
    })
}

/// The names of the relations to which these files belong, as `DATABASE.SCHEMA.RELATION`. Those of which the
/// server knows nothing are left out. The paths begin at the data directory.
///
/// # Errors
/// If the server does not run, or refuses the connection.
fn names(data: &Path, paths: Vec<PathBuf>) -> Result<HashMap<PathBuf, String>> {
    let mut by_database: BTreeMap<u32, Vec<(PathBuf, RelationFile)>> = BTreeMap::new();
    for path in paths {
        if let Some(file) = RelationFile::parse(&path) {
            by_database.entry(file.database).or_default().push((path, file));
        }
    }
    let server = Server::of(data)?;
    let databases = server.databases()?;
    let mut names = HashMap::new();
    for (database, files) in by_database {
        // One that allows no connections has no name here.
        let Some(database) = databases.get(&database) else { continue };
        let filenodes: Vec<u32> = files.iter().map(|(_, file)| file.filenode).collect();
        // It may refuse this user, or have been dropped: those of the others have names all the same.
        let relations = server.relations(database, &filenodes).unwrap_or_else(|error| {
            complain(format!("farpool: {}", describe(&error)));
            HashMap::new()
        });
        for (path, file) in files {
            if let Some(relation) = relations.get(&file.filenode) {
                let fork = file.fork.map(|fork| format!(" ({fork})")).unwrap_or_default();
                names.insert(path, format!("{database}.{relation}{fork}"));
            }
        }
    }
    Ok(names)
}

/// A running server.
struct Server(Config);

impl Server {
    /// The server of a data directory. Its `postmaster.pid` says where it listens.
    fn of(data: &Path) -> Result<Server> {
        let path = data.join("postmaster.pid");
        let text = std::fs::read_to_string(&path).with_context(|| {
            format!("the server does not run, or this user cannot read {}", path.display())
        })?;
        let (host, port) = address(&text).with_context(|| format!("{} has no address", path.display()))?;
        let mut config = Config::new();
        config.host(host).port(port).connect_timeout(CONNECT_WITHIN).options(OPTIONS);
        config.application_name("farpool cache status");
        config.user(&user(data)?);
        Ok(Server(config))
    }

    fn connect(&self, database: &str) -> Result<Client> {
        let mut config = self.0.clone();
        config.dbname(database).connect(NoTls).with_context(|| {
            let user = config.get_user().unwrap_or_default();
            format!("cannot connect to the server as {user}: run this command as that user, or set PGUSER")
        })
    }

    /// The names of the databases that allow connections, by oid.
    fn databases(&self) -> Result<HashMap<u32, String>> {
        let [first, second] = COMMON_DATABASES;
        let mut client = self.connect(first).or_else(|error| self.connect(second).map_err(|_| error))?;
        let rows = client
            .query("SELECT oid, datname::text FROM pg_database WHERE datallowconn", &[])
            .context("cannot list the databases")?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// The names of relations of a database, by filenode.
    fn relations(&self, database: &str, filenodes: &[u32]) -> Result<HashMap<u32, String>> {
        let query = "SELECT node, format('%s.%s', n.nspname, c.relname) FROM unnest($1::oid[]) node \
                     JOIN pg_class c ON c.oid = pg_filenode_relation($2, node) JOIN pg_namespace n ON n.oid = c.relnamespace";
        let rows = self.connect(database)?.query(query, &[&filenodes, &DEFAULT_TABLESPACE]);
        let rows = rows.with_context(|| format!("cannot look up relations of the database {database}"))?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }
}

/// Host (or folder with the socket) and port in a `postmaster.pid`: its lines are the process, the data
/// directory, the time of the start, the port, the first folder with a socket, and the first address.
fn address(postmaster: &str) -> Option<(&str, u16)> {
    let mut lines = postmaster.lines().skip(3);
    let port = lines.next()?.trim().parse().ok()?;
    let (folder, address) = (lines.next()?.trim(), lines.next().unwrap_or_default().trim());
    let address = if address == "*" { "localhost" } else { address };
    let host = if folder.is_empty() { address } else { folder };
    (!host.is_empty()).then_some((host, port))
}

/// Whom to connect as: `PGUSER`, or else the owner of the data directory, whose name the superuser has
/// unless `initdb` was told otherwise.
fn user(data: &Path) -> Result<String> {
    if let Ok(user) = std::env::var("PGUSER") {
        return Ok(user);
    }
    name_of_owner(std::fs::metadata(data).context("cannot look at the data directory")?.uid())
}

fn name_of_owner(owner: u32) -> Result<String> {
    let name = users::name_of(owner).map_err(anyhow::Error::msg)?;
    name.with_context(|| format!("the user {owner} has no name: set PGUSER"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_reached_by_its_socket_or_else_by_its_address() {
        let file =
            |folder: &str, address: &str| format!("1\n/data\n1700000000\n5433\n{folder}\n{address}\n 7 0\n");
        assert_eq!(address(&file("/run/postgresql", "localhost")), Some(("/run/postgresql", 5433)));
        assert_eq!(address(&file("", "*")), Some(("localhost", 5433)));
        assert_eq!((address(&file("", "")), address("1\n/data\n")), (None, None));
    }
    #[test]
    fn root_is_found_by_its_number() {
        assert_eq!(name_of_owner(0).unwrap(), "root");
        assert!(name_of_owner(u32::MAX).unwrap_err().to_string().contains("set PGUSER"));
    }
}

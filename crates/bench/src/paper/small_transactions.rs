//! Small transactions of SQLite by where the database lies. Each transaction creates a journal, writes to it
//! a few times and deletes it, so files are opened for a few calls each. Not from a paper.
//!
//! The mount that admits direct clients is measured twice: with the interposer and without.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Effort;
use super::stage::{Spot, start_pool, subfolder};
use crate::databases::{Runner, sqlite::Sqlite};
use crate::far_memory::{FarMemory, interposer};
use crate::machine;
use crate::progress::Progress;
use crate::stop::StopFlag;

/// Transactions of a slice, each of which inserts a row.
pub const INSERTS: u32 = 1000;
/// Databases of a slice; each is created and gets a row.
pub const DATABASES: u32 = 150;
/// Memory that each of two nodes lends: databases have a few pages.
pub const NODE_MIB: u64 = 256;

/// Where the database lies, and how it is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// In the machine's own memory.
    Tmpfs,
    /// On a mount that admits direct clients, with the interposer.
    Interposed,
    /// On the same mount, through the kernel.
    AcceleratedMount,
    /// On a mount without `--accelerate`.
    PlainMount,
    /// On the machine's disk.
    Disk,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Tmpfs, Self::Interposed, Self::AcceleratedMount, Self::PlainMount, Self::Disk];

    /// The name that readers see.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::Interposed => "interposer, shm",
            Self::AcceleratedMount => "mount --accelerate, by the kernel",
            Self::PlainMount => "mount without --accelerate",
            Self::Disk => "the machine's disk",
        }
    }
}

/// What a script does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Inserts rows into one database, in a transaction each.
    Inserts,
    /// Opens databases, creates a table and a row in each, and closes them.
    Databases,
}

impl Work {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Inserts, Self::Databases];

    /// One unit of the work.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inserts => "inserting a row",
            Self::Databases => "making a database",
        }
    }

    fn count(self) -> u32 {
        match self {
            Self::Inserts => INSERTS,
            Self::Databases => DATABASES,
        }
    }

    fn script(self, dir: &Path) -> String {
        match self {
            Self::Inserts => {
                let row = "INSERT INTO rows (text) VALUES (printf('%0100d', 1));\n";
                format!("CREATE TABLE rows (id INTEGER PRIMARY KEY, text);\n{}", row.repeat(INSERTS as usize))
            }
            Self::Databases => {
                let one = |number: u32| {
                    let path = dir.join(format!("{number}.db"));
                    format!(
                        ".open {}\nCREATE TABLE rows (id);\nINSERT INTO rows VALUES (1);\n",
                        path.display()
                    )
                };
                (0..DATABASES).map(one).collect()
            }
        }
    }
}

/// The results of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timed {
    /// Where.
    pub way: Way,
    /// Doing what.
    pub work: Work,
    /// Microseconds per unit of the work.
    pub each_us: f64,
}

/// Measures: in each round, every work in every way.
pub fn measure(effort: &Effort<'_>, stop: &StopFlag) -> Result<Vec<Timed>> {
    let progress = Progress::on_stderr();
    let sqlite = Sqlite::find()?;
    let work = machine::scratch_dir(effort.work_dir, "farpool-paper-")?;
    let tmpfs = machine::scratch_dir(Path::new("/dev/shm"), "farpool-paper-")?;
    let start = |spot| start_pool(effort.farpool, work.path(), work.path(), spot, NODE_MIB, stop);
    let mut far: Vec<FarMemory> = vec![start(Spot::InterposedShm)?, start(Spot::FarShm)?];
    let root = |way| match way {
        Way::Tmpfs => tmpfs.path(),
        Way::Interposed | Way::AcceleratedMount => far[0].mount_point(),
        Way::PlainMount => far[1].mount_point(),
        Way::Disk => work.path(),
    };
    let interposed = interposer(effort.farpool);
    let mut slices = Vec::new();
    for round in 0..effort.rounds {
        let step = progress.step(format!("small transactions, round {}", round + 1));
        for what in Work::ALL {
            for turn in 0..Way::ALL.len() {
                stop.check()?;
                let way = Way::ALL[(turn + round) % Way::ALL.len()];
                let wrapper = if way == Way::Interposed { &interposed[..] } else { &[] };
                let dir = subfolder(root(way), "small-transactions")?;
                let each_us = time(&sqlite, &Runner { wrapper, stop }, what, &dir)?;
                fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
                slices.push(Timed { way, work: what, each_us });
            }
        }
        step.done("measured");
    }
    far.iter_mut().try_for_each(FarMemory::stop)?;
    Ok(slices)
}

fn time(sqlite: &Sqlite, how: &Runner<'_>, work: Work, dir: &Path) -> Result<f64> {
    let database: PathBuf = dir.join("first.db");
    let seconds = sqlite.seconds(how, &database, work.script(dir))?;
    Ok(seconds * 1e6 / f64::from(work.count()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_script_does_as_many_things_as_are_counted() {
        for work in Work::ALL {
            let script = work.script(Path::new("/far"));
            assert_eq!(script.matches("INSERT").count(), work.count() as usize);
        }
        let databases = Work::Databases.script(Path::new("/far"));
        assert!(databases.starts_with(".open /far/0.db\n"), "{databases}");
        assert_eq!(databases.matches(".open").count(), DATABASES as usize);
    }
}

//! The names of the figures.

use std::fmt;
use std::str::FromStr;

/// A document with figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Document {
    /// Files in far memory.
    Files,
    /// The page cache.
    Cache,
}

/// A figure or table of the papers, as measured here.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Figure {
    /// Throughput of large transfers.
    Damon2,
    /// Latency of small transfers.
    Damon3,
    /// Temporary bytes per query.
    DamonTable1,
    /// TPC-H with temporary storage in several places.
    Damon4,
    /// Traffic while a query runs.
    Damon5,
    /// Throughput under load.
    Sigmod3,
    /// Latency under load.
    Sigmod4,
    /// One client over several nodes.
    Sigmod5,
    /// Several clients on one node.
    Sigmod6,
    /// RangeScan, by where the whole database lies.
    RangeScan,
    /// What lending costs the lender.
    Sigmod13,
    /// Hash+Sort, and its traffic.
    Sigmod14,
    /// The interposer, compared with the machine's own memory and with a ping-pong; not from a paper.
    Interposer,
    /// Small transactions of SQLite; not from a paper.
    SmallTransactions,
    /// The cost of verification; not from a paper.
    Checksum,
    /// RangeScan through the page cache.
    CachedScan,
    /// RangeScan by the size of the page cache.
    Sigmod12,
    /// A standby takes the place of its server, with the pages of its cache.
    Sigmod16,
    /// TPC-H with tables in the page cache and temporary files in far memory; figure 19 as well.
    Sigmod18,
    /// TPC-DS in the same way; figure 21 as well.
    Sigmod20,
    /// RangeScan by the memory of the server itself.
    Sigmod24,
    /// RangeScan on several database servers whose caches lie on one node.
    Sigmod25,
    /// One page that is in the page cache, compared with the machine's own memory; not from a paper.
    CachedPage,
    /// How many reads find their page in the page cache; not from a paper.
    CachedHits,
}

impl Figure {
    /// All figures, in the order of the document.
    pub const ALL: [Figure; 24] = [
        Figure::Damon2,
        Figure::Damon3,
        Figure::DamonTable1,
        Figure::Damon4,
        Figure::Damon5,
        Figure::Sigmod3,
        Figure::Sigmod4,
        Figure::Sigmod5,
        Figure::Sigmod6,
        Figure::RangeScan,
        Figure::Sigmod13,
        Figure::Sigmod14,
        Figure::Interposer,
        Figure::SmallTransactions,
        Figure::Checksum,
        Figure::CachedScan,
        Figure::Sigmod12,
        Figure::Sigmod16,
        Figure::Sigmod18,
        Figure::Sigmod20,
        Figure::Sigmod24,
        Figure::Sigmod25,
        Figure::CachedPage,
        Figure::CachedHits,
    ];

    /// Its heading.
    pub fn title(self) -> &'static str {
        match self {
            Figure::Damon2 => "throughput of large transfers",
            Figure::Damon3 => "latency of small transfers",
            Figure::DamonTable1 => "temporary bytes per query",
            Figure::Damon4 => "TPC-H by where temporary files lie",
            Figure::Damon5 => "temporary traffic while a query runs",
            Figure::Sigmod3 => "throughput under load",
            Figure::Sigmod4 => "latency under load",
            Figure::Sigmod5 => "one client, one to eight nodes",
            Figure::Sigmod6 => "one node, one to eight clients",
            Figure::RangeScan => "RangeScan by where the database lies",
            Figure::Sigmod13 => "what lending costs the lender",
            Figure::Sigmod14 => "Hash+Sort by where temporary files lie",
            Figure::Interposer => "files without a system call",
            Figure::SmallTransactions => "SQLite, files opened for a few calls",
            Figure::Checksum => "what verifying costs",
            Figure::CachedScan => "a database that is larger than its memory",
            Figure::Sigmod12 => "RangeScan by the size of the cache",
            Figure::Sigmod16 => "a standby takes over the cache",
            Figure::Sigmod18 => "TPC-H in far memory",
            Figure::Sigmod20 => "TPC-DS in far memory",
            Figure::Sigmod24 => "RangeScan by the memory of the server",
            Figure::Sigmod25 => "several servers, one node",
            Figure::CachedPage => "a page that is in the cache",
            Figure::CachedHits => "which pages stay in the cache",
        }
    }

    /// Where it is written.
    pub fn document(self) -> Document {
        match self {
            Figure::CachedScan
            | Figure::Sigmod12
            | Figure::Sigmod16
            | Figure::Sigmod18
            | Figure::Sigmod20
            | Figure::Sigmod24
            | Figure::Sigmod25
            | Figure::CachedPage
            | Figure::CachedHits => Document::Cache,
            _ => Document::Files,
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Figure::Damon2 => "damon2",
            Figure::Damon3 => "damon3",
            Figure::DamonTable1 => "damon-table1",
            Figure::Damon4 => "damon4",
            Figure::Damon5 => "damon5",
            Figure::Sigmod3 => "sigmod3",
            Figure::Sigmod4 => "sigmod4",
            Figure::Sigmod5 => "sigmod5",
            Figure::Sigmod6 => "sigmod6",
            Figure::RangeScan => "range-scan",
            Figure::Sigmod13 => "sigmod13",
            Figure::Sigmod14 => "sigmod14",
            Figure::Interposer => "interposer",
            Figure::SmallTransactions => "small-transactions",
            Figure::Checksum => "checksum",
            Figure::CachedScan => "cached-scan",
            Figure::Sigmod12 => "sigmod12",
            Figure::Sigmod16 => "sigmod16",
            Figure::Sigmod18 => "sigmod18",
            Figure::Sigmod20 => "sigmod20",
            Figure::Sigmod24 => "sigmod24",
            Figure::Sigmod25 => "sigmod25",
            Figure::CachedPage => "cached-page",
            Figure::CachedHits => "cached-hits",
        })
    }
}

impl FromStr for Figure {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Figure::ALL.into_iter().find(|figure| figure.to_string() == name);
        found.ok_or_else(|| {
            let names = Figure::ALL.map(|figure| figure.to_string()).join(", ");
            format!("there is no figure '{name}': choose all, {names}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_as_they_are_shown() {
        for figure in Figure::ALL {
            assert_eq!(figure.to_string().parse(), Ok(figure));
        }
        assert!("damon1".parse::<Figure>().unwrap_err().contains("sigmod14"));
    }
}

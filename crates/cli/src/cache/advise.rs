//! `farpool cache advise`: how often pages would be found if the cache had another size.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use farpool_cache::{Advice, CacheClient};
use serde::Serialize;

use super::{attached_door, size_of_pages};
use crate::output::{tell, tell_json};
use crate::size::ByteSize;

/// With so few sampled blocks in half of the cache, the error is more than some points.
const FEW_BLOCKS: u64 = 500;

/// Estimate how often pages would be found if a cache had another size
///
/// Shows the expected hit rate of a cache of half the size, of this size, and of two and four times the size,
/// for the reads that reach the cache. A sample of these reads is taken all the time; what was read lately
/// counts most. The estimate is for a cache that evicts the page which was read the longest time ago (LRU):
/// this one often finds a little more. Where much is written, the estimate is too low, because a page that
/// comes in when it is written counts as one that is first read from the disk.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  farpool cache advise /srv/data")]
pub struct AdviseArgs {
    /// The directory with the files
    #[arg(value_name = "DIR")]
    dir: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `advise` prints. Fields are stable; new ones may be added.
#[derive(Serialize)]
struct Estimates {
    /// How many reads of sampled blocks they rest on; old ones count less.
    samples: u64,
    /// With fewer samples, the estimates are too low.
    needed_samples: u64,
    /// How many blocks are sampled in a cache of this size: with few, the estimates are rough.
    sampled_pages: u64,
    sizes: Vec<Estimate>,
}

#[derive(Clone, Copy, Serialize)]
struct Estimate {
    bytes: u64,
    hit_rate: f64,
}

/// Prints the estimates.
pub fn advise(args: &AdviseArgs) -> Result<()> {
    let door = Arc::new(attached_door(&args.dir)?);
    let data = door.data().display().to_string();
    let Some(advice) = CacheClient::new(door).advice() else {
        bail!(
            "too little was read through the cache of {data} since it was attached, or it does not answer: use it for a \
             while, and see `farpool cache status {data}`"
        );
    };
    let estimates = Estimates::of(&advice);
    if args.json { tell_json(&estimates) } else { tell(estimates.to_string()) }
}

impl Estimates {
    fn of(advice: &Advice) -> Estimates {
        let sizes = advice.sizes().into_iter().zip(advice.hit_rates);
        let sizes = sizes.map(|(pages, hit_rate)| Estimate { bytes: size_of_pages(pages).0, hit_rate });
        let &Advice { samples, needed_samples, sampled_pages, .. } = advice;
        Estimates { samples, needed_samples, sampled_pages, sizes: sizes.collect() }
    }
}

impl std::fmt::Display for Estimates {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(to, "{:>12}  hit rate, expected", "size")?;
        for &Estimate { bytes, hit_rate } in &self.sizes {
            let size = ByteSize(bytes).to_string();
            writeln!(to, "{size:>12}  {:>5.1} %", 100.0 * hit_rate)?;
        }
        write!(to, "from {} sampled reads", self.samples)?;
        if self.samples < self.needed_samples {
            write!(to, ": too few, the rates are too low until there are {}", self.needed_samples)?;
        }
        if self.sampled_pages / 2 < FEW_BLOCKS {
            write!(to, "\nrough: the cache is small, at least beside its --max-memory")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_has_a_line_and_estimates_that_say_little_are_said_to() {
        let hit_rates = [0.5, 0.751, 0.9, 1.0];
        let mut advice = Advice {
            pages: 1 << 19,
            samples: 60_000,
            needed_samples: 49_152,
            sampled_pages: 4_096,
            hit_rates,
        };
        let lines = "        size  hit rate, expected
       2 GiB   50.0 %
       4 GiB   75.1 %
       8 GiB   90.0 %
      16 GiB  100.0 %
from ";
        assert_eq!(Estimates::of(&advice).to_string(), format!("{lines}60000 sampled reads"));
        (advice.samples, advice.sampled_pages) = (999, 999);
        let said = Estimates::of(&advice).to_string();
        let doubts = "999 sampled reads: too few, the rates are too low until there are 49152
rough: the cache is small, at least beside its --max-memory";
        assert_eq!(said, format!("{lines}{doubts}"));
    }
}

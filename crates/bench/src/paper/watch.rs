//! Samples what a process does over time.

use std::time::Instant;

use super::process::Done;

/// What a process had done at one moment of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Seconds since the first sample.
    pub at_s: f64,
    /// Bytes read until then.
    pub read_bytes: u64,
    /// Bytes written until then.
    pub written_bytes: u64,
    /// Processor time until then.
    pub cpu_s: f64,
}

/// Samples a process from time to time. If processes follow one another, only the samples of the last one are
/// kept.
#[derive(Default)]
pub struct Watch {
    since: Option<(u32, Instant, Done)>,
    /// All samples of the process.
    pub samples: Vec<Sample>,
}

impl Watch {
    /// Takes a sample of a process, if it exists.
    pub fn look(&mut self, pid: u32) {
        let Some(done) = Done::of(pid) else { return };
        if self.since.is_none_or(|(before, ..)| before != pid) {
            self.since = Some((pid, Instant::now(), done));
            self.samples.clear();
        }
        if let Some((_, started, before)) = self.since {
            self.samples.push(Sample {
                at_s: started.elapsed().as_secs_f64(),
                read_bytes: done.read_bytes.saturating_sub(before.read_bytes),
                written_bytes: done.written_bytes.saturating_sub(before.written_bytes),
                cpu_s: done.cpu_s - before.cpu_s,
            });
        }
    }

    /// Samples the known process; if it has ended, the one that `find` returns.
    pub fn look_for(&mut self, find: impl FnOnce() -> Option<u32>) {
        let known = self.since.map(|(pid, ..)| pid).filter(|&pid| Done::of(pid).is_some());
        if let Some(pid) = known.or_else(find) {
            self.look(pid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_counts_from_its_first_sample() {
        let mut watch = Watch::default();
        watch.look(std::process::id());
        watch.look_for(|| None);
        assert_eq!(watch.samples[0].read_bytes, 0);
        assert!(watch.samples[1].read_bytes > 0, "it has read /proc");
        watch.look(u32::MAX);
        assert_eq!(watch.samples.len(), 2);
    }
}

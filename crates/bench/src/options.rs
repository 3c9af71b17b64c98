//! Options of a measurement of the fabric, checked before anything starts. Error messages name the option to
//! change.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use farpool_fabric::{MAX_BATCH, MAX_IN_FLIGHT, TransportChoice};
use farpool_wire::{CALL_ECHO, MAX_CALL_BYTES, MAX_TRANSFER_BYTES};
use serde::{Deserialize, Serialize};

/// Most threads of one run: more than the spare processors of any machine that this is meant for.
pub const THREADS_MAX: usize = 256;
/// Atomics work on words of this size.
pub const WORD_BYTES: usize = 8;
/// Bytes of a call unless `--block` says otherwise: a cache line each way.
const CALL_BLOCK_BYTES: usize = 64;
/// Bytes of a read or write unless `--block` says otherwise: a database page.
const TRANSFER_BLOCK_BYTES: usize = 8 << 10;

/// Gives the values of an option their names, on the command line and in reports. Errors list them.
macro_rules! named {
    ($type:ident, $what:literal, $($value:ident = $name:literal),+ $(,)?) => {
        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(name: &str) -> Result<Self, String> {
                match name {
                    $($name => Ok(Self::$value),)+
                    other => {
                        Err(format!("unknown {} '{other}': choose {}", $what, $crate::options::list(&[$($name),+])))
                    }
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Self::$value => $name),+ })
            }
        }
    };
}
pub(crate) use named;

/// A list for a message: "read, write or call".
pub(crate) fn list(names: &[&str]) -> String {
    let (last, others) = names.split_last().expect("an option has values");
    if others.is_empty() { (*last).to_owned() } else { format!("{} or {last}", others.join(", ")) }
}

/// An error if a measurement has no duration.
pub fn check_duration(duration: Duration) -> Result<(), String> {
    if duration.is_zero() {
        return Err("the duration is zero: give --seconds 1 or more".into());
    }
    Ok(())
}

/// An operation of the fabric.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoOp {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// Compare-and-swap of a word.
    Cas,
    /// Fetch-and-add to a word.
    Faa,
    /// CALL: the node's processor sends back what it got.
    Call,
}

impl IoOp {
    /// Whether it works on one word, whatever the block size.
    pub fn is_atomic(self) -> bool {
        matches!(self, IoOp::Cas | IoOp::Faa)
    }
}

named!(IoOp, "operation", Read = "read", Write = "write", Cas = "cas", Faa = "faa", Call = "call");

/// Where operations go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Anywhere in the footprint.
    #[default]
    Random,
    /// To the next block; after the last block to the first.
    Sequential,
}

named!(Pattern, "pattern", Random = "random", Sequential = "sequential");

/// The transport to measure: a [`TransportChoice`] other than `auto`, since a figure must say what it is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IoTransport(pub TransportChoice);

impl FromStr for IoTransport {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name.parse() {
            Ok(TransportChoice::Auto) | Err(_) => {
                Err(format!("cannot measure transport '{name}' in this build: choose shm, tcp or verbs"))
            }
            Ok(choice) => Ok(IoTransport(choice)),
        }
    }
}

impl fmt::Display for IoTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            TransportChoice::Auto => "auto",
            TransportChoice::Shm => "shm",
            TransportChoice::Tcp => "tcp",
            TransportChoice::Verbs => "verbs",
        })
    }
}

/// One measurement.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct IoOptions {
    /// The transport.
    pub transport: IoTransport,
    /// The operation.
    pub op: IoOp,
    /// Where operations go.
    pub pattern: Pattern,
    /// Bytes per operation; see [`IoOptions::default_block`].
    pub block_bytes: usize,
    /// Doorbells in flight per thread.
    pub depth: usize,
    /// Operations per doorbell.
    pub batch: usize,
    /// Number of threads, each with an endpoint.
    pub threads: usize,
    /// Size of the far memory that operations are spread over.
    pub footprint_bytes: u64,
    /// How long operations are measured in all, without floors and warm-up.
    pub duration: Duration,
    /// Whether to measure the floor in between.
    pub floor: bool,
}

impl IoOptions {
    /// Default bytes per operation.
    pub fn default_block(op: IoOp) -> usize {
        match op {
            IoOp::Read | IoOp::Write => TRANSFER_BLOCK_BYTES,
            IoOp::Cas | IoOp::Faa => WORD_BYTES,
            IoOp::Call => CALL_BLOCK_BYTES,
        }
    }

    /// Checks the options.
    pub fn check(&self) -> Result<(), String> {
        self.check_transport()?;
        self.check_block()?;
        let in_flight = self.depth.saturating_mul(self.batch);
        if self.depth == 0 || self.batch == 0 || in_flight > MAX_IN_FLIGHT {
            return Err(format!(
                "depth {} with batches of {}: a thread has from 1 to {MAX_IN_FLIGHT} operations in flight; \
                 lower --depth or --batch",
                self.depth, self.batch
            ));
        }
        if self.batch > MAX_BATCH {
            return Err(format!("batches of {}: choose --batch from 1 to {MAX_BATCH}", self.batch));
        }
        if !(1..=THREADS_MAX).contains(&self.threads) {
            return Err(format!("{} threads: choose --threads from 1 to {THREADS_MAX}", self.threads));
        }
        if self.batch > 1 && self.op == IoOp::Call {
            return Err("calls are not batched: leave --batch out, and raise --depth instead".into());
        }
        check_duration(self.duration)
    }

    /// A network card does all of the work, so there is no bare operation to compare it with.
    fn check_transport(&self) -> Result<(), String> {
        if self.transport.0 == TransportChoice::Verbs && self.floor {
            return Err("there is no floor for verbs: leave --floor out".into());
        }
        Ok(())
    }

    fn check_block(&self) -> Result<(), String> {
        let block = self.block_bytes;
        let most = if self.op == IoOp::Call { MAX_CALL_BYTES } else { MAX_TRANSFER_BYTES };
        if self.op.is_atomic() && block != WORD_BYTES {
            return Err(format!("atomics work on words of {WORD_BYTES} bytes: leave --block out"));
        }
        if !block.is_multiple_of(WORD_BYTES) || !(WORD_BYTES..=most).contains(&block) {
            return Err(format!(
                "blocks of {block} bytes: for {} choose --block as a multiple of {WORD_BYTES}, {most} at most",
                self.op
            ));
        }
        debug_assert!(CALL_ECHO.len() <= WORD_BYTES, "the smallest call holds its name");
        if block as u64 > self.footprint_bytes {
            return Err("a block is larger than the footprint: raise --footprint or lower --block".into());
        }
        Ok(())
    }

    /// Doorbells that are timed together, so that reading the clock, some twenty nanoseconds, does not
    /// matter.
    pub fn timed_together(&self) -> usize {
        const SMALL_BYTES: usize = 1024;
        let by_processor = self.transport.0 == TransportChoice::Shm;
        match self.op {
            _ if !by_processor => 1,
            IoOp::Call => 64,
            _ if self.block_bytes < SMALL_BYTES => (256 / self.batch).max(1),
            _ => 16usize.div_ceil(self.batch),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A small, valid measurement.
    pub fn small(transport: TransportChoice, op: IoOp) -> IoOptions {
        IoOptions {
            transport: IoTransport(transport),
            op,
            pattern: Pattern::Random,
            block_bytes: IoOptions::default_block(op),
            depth: 1,
            batch: 1,
            threads: 1,
            footprint_bytes: 4 << 20,
            duration: Duration::from_millis(1),
            floor: true,
        }
    }

    #[test]
    fn bad_options_are_refused_with_the_option_to_change() {
        let good = small(TransportChoice::Shm, IoOp::Read);
        good.check().unwrap();
        let bad = [
            (IoOptions { depth: 0, ..good }, "--depth"),
            (small(TransportChoice::Verbs, IoOp::Read), "--floor"),
            (IoOptions { depth: 16, batch: 16, ..good }, "--batch"),
            (IoOptions { threads: 0, ..good }, "--threads"),
            (IoOptions { block_bytes: 12, ..good }, "--block"),
            (IoOptions { block_bytes: 2 << 20, ..good }, "--block"),
            (IoOptions { footprint_bytes: 4096, ..good }, "--footprint"),
            (IoOptions { duration: Duration::ZERO, ..good }, "--seconds"),
            (IoOptions { block_bytes: 64, ..small(TransportChoice::Tcp, IoOp::Cas) }, "--block"),
            (IoOptions { batch: 2, ..small(TransportChoice::Tcp, IoOp::Call) }, "--batch"),
        ];
        for (options, fix) in bad {
            let complaint = options.check().unwrap_err();
            assert!(complaint.contains(fix), "{complaint}");
        }
    }

    #[test]
    fn names_are_read_as_they_are_shown() {
        for op in [IoOp::Read, IoOp::Write, IoOp::Cas, IoOp::Faa, IoOp::Call] {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        for pattern in [Pattern::Random, Pattern::Sequential] {
            assert_eq!(pattern.to_string().parse(), Ok(pattern));
        }
        for name in ["shm", "tcp"] {
            assert_eq!(name.parse::<IoTransport>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_known_ones() {
        assert!("auto".parse::<IoTransport>().unwrap_err().contains("shm, tcp or verbs"));
        assert!("append".parse::<IoOp>().unwrap_err().contains("faa"));
        assert!("zipf".parse::<Pattern>().unwrap_err().contains("sequential"));
    }

    #[test]
    fn short_operations_are_timed_together_and_long_ones_singly() {
        assert_eq!(small(TransportChoice::Shm, IoOp::Cas).timed_together(), 256);
        assert_eq!(small(TransportChoice::Tcp, IoOp::Read).timed_together(), 1);
    }
}

//! The machine that a figure was measured on.

use std::fs;

use serde::{Deserialize, Serialize};

/// What a figure depends on besides the program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name for itself.
    pub processor: String,
    /// Processors this process may use.
    pub cores: usize,
    /// Main memory.
    pub memory_gib: u64,
    /// The kernel's release.
    pub kernel: String,
}

impl Machine {
    /// This machine; what it does not tell is `unknown`.
    pub fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let memory_kib = field(&meminfo, "MemTotal").and_then(|text| text.split(' ').next()?.parse().ok());
        Machine {
            processor: field(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gib: memory_kib.unwrap_or(0u64) / (1 << 20),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        }
    }
}

fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_once(':')?.1.trim())
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Machine { processor, cores, memory_gib, kernel } = self;
        write!(f, "{processor}, {cores} cores, {memory_gib} GiB, Linux {kernel}")
    }
}

//! Pages: of what size those of some mapping are, and memory of our own with the same.
//!
//! A random access to 4 KiB pages misses the translation cache as well as the data cache, so a floor on other
//! pages than what it is compared with would compare nothing.

use std::fmt;
use std::fs;
use std::io;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use farpool_fabric::SharedMemory;
use rustix::mm::Advice;

/// How the kernel came to the pages of shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// The machine's smallest.
    Small,
    /// Small ones that the kernel has put together.
    Transparent,
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pages::Small => "small",
            Pages::Transparent => "transparent",
        })
    }
}

impl FromStr for Pages {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = [Pages::Small, Pages::Transparent];
        let found = known.into_iter().find(|pages| pages.to_string() == name);
        found.ok_or_else(|| format!("unknown pages '{name}': choose small or transparent"))
    }
}

const SMALL_KIB: u64 = 4;
const HUGE_KIB: u64 = 2048;
const HUGE_BYTES: usize = 2 << 20;

impl Pages {
    /// Size of a page.
    pub fn kib(self) -> u64 {
        if self == Pages::Small { SMALL_KIB } else { HUGE_KIB }
    }

    /// Of the memory files with `name` (as given to memfd_create(2)) that process `id` maps; `None` when it
    /// maps none.
    pub fn of_process(id: u32, name: &str) -> Result<Option<Self>> {
        let path = format!("/proc/{id}/smaps");
        let smaps = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Ok(Self::of_smaps(&smaps, &format!("/memfd:{name}")))
    }

    /// The pages of most of what is mapped under the name.
    fn of_smaps(smaps: &str, name: &str) -> Option<Self> {
        let (mut mapped, mut together) = (0, 0);
        let mut counts = false;
        for line in smaps.lines() {
            let Some((field, value)) = line.split_once(':').filter(|(field, _)| !field.contains(' ')) else {
                counts = line.contains(name);
                continue;
            };
            let kib: u64 = value.split_whitespace().next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
            match field {
                _ if !counts => {}
                "Size" => mapped += kib,
                "ShmemPmdMapped" | "FilePmdMapped" => together += kib,
                _ => {}
            }
        }
        match () {
            () if mapped == 0 => None,
            () if 2 * together > mapped => Some(Pages::Transparent),
            () => Some(Pages::Small),
        }
    }
}

/// Zeroed memory of our own, allocated, that no other process has.
#[derive(Debug)]
pub struct SharedPages {
    memory: SharedMemory,
}

/// Name of the floor's memory in `/proc/PID/maps`.
const FLOOR_NAME: &str = "farpool-floor";

impl SharedPages {
    /// Memory on such pages.
    pub fn new(bytes: usize, pages: Pages) -> Result<Self> {
        let mapped = if pages == Pages::Small { bytes } else { bytes.next_multiple_of(HUGE_BYTES) };
        let memory = Self::allocate(mapped, pages).with_context(|| {
            format!("the floor needs {} MiB more memory: lower --footprint", mapped >> 20)
        })?;
        if pages == Pages::Transparent
            && Pages::of_process(std::process::id(), FLOOR_NAME)? != Some(Pages::Transparent)
        {
            bail!("the kernel has no large pages left for the floor: lower --footprint, or end something");
        }
        Ok(SharedPages { memory })
    }

    fn allocate(bytes: usize, pages: Pages) -> io::Result<SharedMemory> {
        let memory = SharedMemory::create(FLOOR_NAME, bytes as u64)?;
        let mapping = memory.mapping();
        match pages {
            Pages::Transparent => drop(mapping.prefault()?),
            // SAFETY: the range is the mapping's; populating it changes no contents.
            Pages::Small => unsafe {
                rustix::mm::madvise(mapping.base().cast(), bytes, Advice::LinuxPopulateWrite)?;
            },
        }
        Ok(memory)
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.memory.mapping().base()
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.memory.mapping().len() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn smaps(together: u64) -> String {
        format!(
            "7f00-7f10 rw-p 00000000 00:00 0 \nSize: 900 kB\nKernelPageSize: 4 kB\n\
             7f20-7f30 rw-s 00000000 00:01 7 /memfd:far (deleted)\nSize: 65536 kB\nKernelPageSize: 4 kB\n\
             ShmemPmdMapped: {together} kB\nVmFlags: rd wr sh\n"
        )
    }

    #[test]
    fn pages_are_told_by_what_the_kernel_says_of_the_mapping() {
        assert_eq!(Pages::of_smaps(&smaps(0), "/memfd:far"), Some(Pages::Small));
        assert_eq!(Pages::of_smaps(&smaps(65536), "/memfd:far"), Some(Pages::Transparent));
        assert_eq!(Pages::of_smaps(&smaps(0), "/memfd:near"), None);
    }

    #[test]
    fn pages_are_read_as_they_are_shown() {
        for pages in [Pages::Small, Pages::Transparent] {
            assert_eq!(pages.to_string().parse(), Ok(pages));
        }
        assert!("large".parse::<Pages>().unwrap_err().contains("transparent"));
    }

    #[test]
    fn memory_of_our_own_is_found_in_the_kernels_list() {
        let memory = SharedPages::new(1 << 20, Pages::Small).unwrap();
        assert_eq!(memory.bytes(), 1 << 20);
        assert_eq!(Pages::of_process(std::process::id(), FLOOR_NAME).unwrap(), Some(Pages::Small));
    }
}

//! Page sizes: the page size of a given mapping, and memory of our own with the same page size.
//!
//! A random access to 4 KiB pages misses the translation cache as well as the data cache. So a floor with
//! other pages than the memory that it is compared with would be meaningless.

use std::fs;
use std::io;

use anyhow::{Context, Result, bail};
use farpool_fabric::SharedMemory;
use rustix::mm::Advice;

use crate::options::named;

/// The kind of pages behind shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// The machine's smallest pages.
    Small,
    /// Small pages that the kernel has merged into large ones.
    Transparent,
}

named!(Pages, "pages", Small = "small", Transparent = "transparent");

const SMALL_KIB: u64 = 4;
const HUGE_KIB: u64 = 2048;
const HUGE_BYTES: usize = 2 << 20;

impl Pages {
    /// Size of a page.
    pub fn kib(self) -> u64 {
        if self == Pages::Small { SMALL_KIB } else { HUGE_KIB }
    }

    /// The pages of the memory files with `name` (as given to memfd_create(2)) that process `id` maps; `None`
    /// if it maps none.
    pub fn of_process(id: u32, name: &str) -> Result<Option<Self>> {
        let path = format!("/proc/{id}/smaps");
        let smaps = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Ok(Self::of_smaps(&smaps, &format!("/memfd:{name}")))
    }

    /// The kind of more than half of the pages mapped under the name.
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

/// Zeroed memory, allocated in advance, that no other process maps.
#[derive(Debug)]
pub struct SharedPages {
    memory: SharedMemory,
}

/// Name of the floor's memory in `/proc/PID/maps`.
const FLOOR_NAME: &str = "farpool-floor";

impl SharedPages {
    /// Allocates memory on such pages; an error if the kernel has none left.
    pub fn new(bytes: usize, pages: Pages) -> Result<Self> {
        let mapped = if pages == Pages::Small { bytes } else { bytes.next_multiple_of(HUGE_BYTES) };
        let memory = Self::allocate(mapped, pages).with_context(|| {
            format!("the floor needs {} MiB more memory: lower --footprint", mapped >> 20)
        })?;
        if pages == Pages::Transparent
            && Pages::of_process(std::process::id(), FLOOR_NAME)? != Some(Pages::Transparent)
        {
            bail!(
                "the kernel has no large pages left for the floor: lower --footprint, or end other programs"
            );
        }
        Ok(SharedPages { memory })
    }

    fn allocate(bytes: usize, pages: Pages) -> io::Result<SharedMemory> {
        let memory = SharedMemory::create(FLOOR_NAME, bytes as u64)?;
        let mapping = memory.mapping();
        match pages {
            Pages::Transparent => drop(mapping.prefault()?),
            // SAFETY: the range is exactly the mapping's; populating it changes no contents.
            Pages::Small => unsafe {
                rustix::mm::madvise(mapping.base().cast(), bytes, Advice::LinuxPopulateWrite)?;
            },
        }
        Ok(memory)
    }

    /// The address of the first byte.
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
    fn kind_of_pages_is_read_from_the_kernels_account_of_the_mapping() {
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

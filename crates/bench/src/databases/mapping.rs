//! A file mapped for reading and writing by several processes. Bytes are copied in and out, never borrowed,
//! since other processes write meanwhile.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use rustix::mm::{MapFlags, MremapFlags, MsyncFlags, ProtFlags, mmap, mremap, msync, munmap};

/// A shared mapping of a file, from its first byte.
#[derive(Debug)]
pub struct Mapping {
    start: *mut u8,
    length: usize,
}

impl Mapping {
    /// Maps the first `length` bytes.
    pub fn new(file: &File, length: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing; only this value knows
        // it, and unmaps it in `Drop`.
        let start = unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) };
        Ok(Self { start: start.context("cannot map a file")?.cast(), length })
    }

    /// Bytes that are mapped.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Extends the mapping after the file has grown; the mapping may move.
    pub fn grow(&mut self, length: usize) -> Result<()> {
        // SAFETY: the mapping is this value's own and alive, of this length; `&mut self` excludes every copy
        // meanwhile, and no pointer into it is kept elsewhere.
        let start = unsafe { mremap(self.start.cast(), self.length, length, MremapFlags::MAYMOVE) };
        (self.start, self.length) = (start.context("cannot grow a mapping")?.cast(), length);
        Ok(())
    }

    /// Copies `data` to `offset`.
    pub fn write(&mut self, offset: usize, data: &[u8]) -> Result<()> {
        self.check(offset, data.len())?;
        // SAFETY: within the mapping, as just checked; `data` is another allocation, so the ranges do not
        // overlap; the mapping is alive as long as `self`. Another process may write there at the same time:
        // then bytes are mixed, and every mix of bytes is valid.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.start.add(offset), data.len()) }
        Ok(())
    }

    /// Copies from `offset` to `data`.
    pub fn read(&self, offset: usize, data: &mut [u8]) -> Result<()> {
        self.check(offset, data.len())?;
        // SAFETY: within the mapping, as just checked; `data` is another allocation, so the ranges do not
        // overlap; the mapping is alive as long as `self`. Another process may write there at the same time:
        // then bytes are mixed, and every mix of bytes is valid.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset), data.as_mut_ptr(), data.len()) }
        Ok(())
    }

    /// Waits until the file system has written everything.
    pub fn sync(&self) -> Result<()> {
        // SAFETY: the mapping is alive, and nothing about it changes.
        unsafe { msync(self.start.cast(), self.length, MsyncFlags::SYNC) }.context("cannot sync a mapping")
    }

    fn check(&self, offset: usize, length: usize) -> Result<()> {
        let within = offset.checked_add(length).is_some_and(|end| end <= self.length);
        ensure!(within, "{length} bytes at {offset} of a mapping of {}", self.length);
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this length, and nothing refers to it any more. It
        // fails only for a range that is not mapped, which this one is; so the result is ignored.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_that_grew_keeps_its_bytes_and_takes_new_ones() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let mut mapping = Mapping::new(&file, 4096).unwrap();
        mapping.write(4090, b"before").unwrap();
        assert!(mapping.write(4091, b"before").is_err());
        file.set_len(1 << 20).unwrap();
        mapping.grow(1 << 20).unwrap();
        mapping.write((1 << 20) - 5, b"after").unwrap();
        let mut found = [0; 6];
        mapping.read(4090, &mut found).unwrap();
        assert_eq!(&found, b"before");
        assert!(mapping.read(usize::MAX, &mut found).is_err());
    }
}

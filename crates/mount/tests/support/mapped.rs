//! Files mapped into memory.

use std::fs::File;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

/// A file mapped for reading and writing.
pub struct Mapped {
    start: *mut u8,
    length: usize,
}

impl Mapped {
    pub fn new(file: &File, length: usize, flags: MapFlags) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping of `length` bytes that only this value knows, unmapped by its `Drop`.
        let start = unsafe { mmap(std::ptr::null_mut(), length, access, flags, file, 0) }.unwrap();
        Mapped { start: start.cast(), length }
    }

    pub fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.length);
        // SAFETY: within the mapping, as just checked; alive with `self`; no reference to the mapping exists.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.start.add(offset), data.len()) }
    }

    pub fn read(&self, offset: usize, length: usize) -> Vec<u8> {
        assert!(offset + length <= self.length);
        let mut data = vec![0; length];
        // SAFETY: within the mapping, which is checked above; alive with `self`; no reference to the mapping
        // exists.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(offset), data.as_mut_ptr(), length) }
        data
    }

    pub fn try_sync(&self) -> rustix::io::Result<()> {
        // SAFETY: the mapping is alive.
        unsafe { msync(self.start.cast(), self.length, MsyncFlags::SYNC) }
    }

    pub fn sync(&self) {
        self.try_sync().unwrap();
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: only this value knows the mapping, and it ends here.
        unsafe { munmap(self.start.cast(), self.length) }.unwrap();
    }
}

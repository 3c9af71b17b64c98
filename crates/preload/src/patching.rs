//! Hooks in a process that runs already: the import tables of its objects are changed, so that calls of
//! hooked functions come here. With `LD_PRELOAD` the dynamic linker does the same.
//!
//! P1. Only slots are changed that import a hooked function and hold libc's, or are not bound yet; and only
//! in
//!     objects other than libc, the dynamic linker, the vDSO and this one. So the functions that
//!     [`hooks`](crate::hooks) call in turn are still libc's, and what another library has put there stays.
//! P2. A slot is changed by one store of a whole word, so other threads call the old function or the new one.
//!     Memory that the dynamic linker has made read-only is read-only again afterwards.
//! P3. Objects that are loaded later are hooked when a hooked function opens a file for the next time.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The functions that are hooked, divided by white space.
const NAMES: &str = include_str!("hooks/names.txt");

/// Where each hooked function lies here, by its name.
static HOOKS: OnceLock<Hooks> = OnceLock::new();

type Hooks = BTreeMap<&'static [u8], Hook>;

/// A hooked function.
#[derive(Clone, Copy)]
struct Hook {
    own: usize,
    /// Where the function lies that the program would call otherwise.
    original: usize,
}

/// Entries of the dynamic section (`elf(5)`).
const DT_PLTRELSZ: i64 = 2;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;

/// Relocations that store the address of a function: for the linkage table, the offset table, and data.
#[cfg(target_arch = "x86_64")]
const SLOT_KINDS: [u32; 3] = [7, 6, 1];
#[cfg(target_arch = "aarch64")]
const SLOT_KINDS: [u32; 3] = [1026, 1025, 257];

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

#[repr(C)]
struct Relocation {
    offset: usize,
    info: u64,
    addend: i64,
}

/// Hooks this process. Returns how many slots were changed. May be called again.
///
/// # Errors
/// If this library cannot be found among the loaded objects, or memory cannot be made writable. Some slots
/// may have been changed by then, which does no harm.
pub fn hook_process() -> io::Result<usize> {
    let hooks = match HOOKS.get() {
        Some(hooks) => hooks,
        None => {
            let found = find_hooks()?;
            HOOKS.get_or_init(|| found)
        }
    };
    let mut pass = Pass { hooks, changed: 0, failure: None };
    // SAFETY: `note_object` has the type that is wanted, and `pass` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(note_object), (&raw mut pass).cast()) };
    pass.failure.map_or(Ok(pass.changed), Err)
}

/// Hooks objects that were loaded since the last time, if the process was hooked at all (P3).
pub(crate) fn hook_new_objects() {
    if HOOKS.get().is_none() {
        return;
    }
    // It allocates: a signal handler that has interrupted the library leaves this to a later call.
    crate::entry::do_within(|| {
        let mut loaded = 0_u64;
        // SAFETY: `note_loads` has the type that is wanted, and `loaded` outlives the call.
        unsafe { libc::dl_iterate_phdr(Some(note_loads), (&raw mut loaded).cast()) };
        if LOADED.swap(loaded, Ordering::Relaxed) != loaded {
            // If it fails, the object's calls are not announced, like those of a program that is not hooked.
            let _ = hook_process();
        }
    });
}

/// How often an object had been loaded when the process was last hooked.
static LOADED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn note_loads(
    info: *mut libc::dl_phdr_info,
    _: libc::size_t,
    loaded: *mut c_void,
) -> c_int {
    // SAFETY: `hook_new_objects` passes its own number, and the dynamic linker describes an object.
    unsafe { *loaded.cast::<u64>() = (*info).dlpi_adds };
    1 // one object is enough
}

/// The file from which an address was loaded.
fn object_of(address: *const c_void) -> Option<&'static CStr> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: `info` has room for what is found, and lives until the call returns.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) } != 0;
    // SAFETY: the call succeeded, so it is filled. Names of objects last as long as these, and this one
    // stays.
    found.then(|| unsafe { CStr::from_ptr(info.assume_init().dli_fname) })
}

/// Whether a function is one of this library.
pub(crate) fn is_own(function: *const c_void) -> bool {
    object_of(function).is_some_and(|object| object_of(hook_process as *const c_void) == Some(object))
}

fn find_hooks() -> io::Result<Hooks> {
    let missing = |what: &str| {
        io::Error::new(io::ErrorKind::NotFound, format!("{what} is not among the loaded objects"))
    };
    let own = object_of(hook_process as *const c_void).ok_or_else(|| missing("this library"))?;
    // SAFETY: the name is a C string. The object is loaded, so nothing of it runs now.
    let handle = unsafe { libc::dlopen(own.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return Err(missing("this library"));
    }
    let mut hooks = BTreeMap::new();
    for name in NAMES.split_ascii_whitespace() {
        let symbol = CString::new(name).map_err(io::Error::other)?;
        // SAFETY: a handle from `dlopen`, and a C string. This object is searched before those that it needs.
        let at = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
        if at.is_null() || object_of(at) != Some(own) {
            return Err(missing(name));
        }
        // SAFETY: a C string.
        let original = unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.as_ptr()) };
        if !original.is_null() {
            hooks.insert(name.as_bytes(), Hook { own: at as usize, original: original as usize });
        }
    }
    Ok(hooks)
}

/// One walk over all objects.
struct Pass {
    hooks: &'static Hooks,
    changed: usize,
    failure: Option<io::Error>,
}

unsafe extern "C" fn note_object(info: *mut libc::dl_phdr_info, _: libc::size_t, pass: *mut c_void) -> c_int {
    // SAFETY: `hook_process` passes its own `Pass`, which nobody else uses meanwhile.
    let pass = unsafe { &mut *pass.cast::<Pass>() };
    // SAFETY: the dynamic linker describes an object, which stays loaded until this call returns.
    let object = unsafe { Object::of(&*info) };
    if let Some(object) = object.filter(|object| !object.is_exempt()) {
        match object.hook(pass.hooks) {
            Ok(changed) => pass.changed += changed,
            Err(error) => pass.failure = Some(error),
        }
    }
    0
}

/// A loaded object.
struct Object<'a> {
    name: &'a CStr,
    base: usize,
    /// The memory of its segments.
    segments: Vec<Range<usize>>,
    /// The memory of those that were loaded writable.
    writable: Vec<Range<usize>>,
    /// What the dynamic linker has made read-only.
    read_only: Option<Range<usize>>,
    dynamic: *const Dynamic,
}

impl<'a> Object<'a> {
    /// `None`: it imports nothing.
    ///
    /// # Safety
    /// The dynamic linker has made `info` in a call of `dl_iterate_phdr`, which has not ended.
    unsafe fn of(info: &'a libc::dl_phdr_info) -> Option<Object<'a>> {
        let base = info.dlpi_addr as usize;
        // SAFETY: the object's program headers, as many as it says. They are read-only, and stay until it is
        // unloaded.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let memory = |header: &libc::Elf64_Phdr| {
            let start = base.wrapping_add(header.p_vaddr as usize);
            start..start.wrapping_add(header.p_memsz as usize)
        };
        let of_kind = |kind| headers.iter().filter(move |header| header.p_type == kind).map(memory);
        Some(Object {
            // SAFETY: the dynamic linker's name of the object, a C string that stays until it is unloaded.
            name: if info.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(info.dlpi_name) } },
            base,
            segments: of_kind(libc::PT_LOAD).collect(),
            writable: headers
                .iter()
                .filter(|header| header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W != 0)
                .map(memory)
                .collect(),
            read_only: of_kind(libc::PT_GNU_RELRO).next(),
            dynamic: std::ptr::with_exposed_provenance(of_kind(libc::PT_DYNAMIC).next()?.start),
        })
    }

    /// Whether its calls are left alone (P1).
    fn is_exempt(&self) -> bool {
        let has = |address: usize| self.segments.iter().any(|segment| segment.contains(&address));
        let file =
            Path::new(OsStr::from_bytes(self.name.to_bytes())).file_name().unwrap_or_default().as_bytes();
        let is_of_system =
            [&b"libc.so"[..], b"ld-linux", b"linux-vdso"].iter().any(|start| file.starts_with(start));
        is_of_system || has(hook_process as *const () as usize)
    }

    /// The value of an entry of the dynamic section.
    fn entry(&self, tag: i64) -> Option<usize> {
        for at in 0.. {
            // SAFETY: the section ends with an entry of tag 0, which is the last one that is read. It stays
            // until the object is unloaded, and the dynamic linker changes it only before it runs the
            // object's code.
            let entry = unsafe { &*self.dynamic.add(at) };
            match entry.tag {
                0 => return None,
                found if found == tag => return Some(entry.value),
                _ => {}
            }
        }
        None
    }

    /// An address in the dynamic section. The dynamic linker has added the base to most of them.
    fn address<T>(&self, tag: i64) -> Option<*const T> {
        let value = self.entry(tag)?;
        let at = if value < self.base { value.wrapping_add(self.base) } else { value };
        Some(std::ptr::with_exposed_provenance(at))
    }

    fn hook(&self, hooks: &Hooks) -> io::Result<usize> {
        let tables = [(DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)];
        let names = self.address::<Symbol>(DT_SYMTAB).zip(self.address::<c_char>(DT_STRTAB));
        let Some((symbols, strings)) = names else { return Ok(0) };
        let mut changed = 0;
        for (table, bytes) in tables {
            let Some((first, bytes)) = self.address::<Relocation>(table).zip(self.entry(bytes)) else {
                continue;
            };
            // SAFETY: the object's own table, of that many bytes, which is read-only.
            let relocations = unsafe { std::slice::from_raw_parts(first, bytes / size_of::<Relocation>()) };
            for relocation in relocations {
                let kind = relocation.info as u32;
                if !SLOT_KINDS.contains(&kind) || relocation.addend != 0 {
                    continue;
                }
                // SAFETY: a relocation names a symbol of the object's own table, and this a string of its own
                // table.
                let (symbol, name) = unsafe {
                    let symbol = &*symbols.add((relocation.info >> 32) as usize);
                    (symbol, CStr::from_ptr(strings.add(symbol.name as usize)))
                };
                let is_imported = symbol.section == 0;
                if let Some(hook) = hooks.get(name.to_bytes()).filter(|_| is_imported) {
                    let is_lazy = kind == SLOT_KINDS[0];
                    let slot = self.base.wrapping_add(relocation.offset);
                    changed += usize::from(self.change(slot, *hook, is_lazy)?);
                }
            }
        }
        Ok(changed)
    }

    /// Lets a slot hold the address of a function here, if it holds libc's, or if it `is_lazy` and not bound:
    /// then it holds an address in this object. Returns whether it was changed (P1, P2).
    fn change(&self, slot: usize, hook: Hook, is_lazy: bool) -> io::Result<bool> {
        let within =
            |segments: &[Range<usize>], at: usize| segments.iter().any(|segment| segment.contains(&at));
        if !slot.is_multiple_of(align_of::<AtomicUsize>()) || !within(&self.writable, slot) {
            return Ok(false);
        }
        // SAFETY:
        // - In bounds: an aligned word of the object's own memory, checked above.
        // - Exclusive: not needed, it is changed by atomic stores only once the object runs.
        // - Alive: until the object is unloaded, which waits for `dl_iterate_phdr`.
        let word = unsafe { &*std::ptr::with_exposed_provenance::<AtomicUsize>(slot) };
        let held = word.load(Ordering::Relaxed);
        if held != hook.original && !(is_lazy && within(&self.segments, held)) {
            return Ok(false);
        }
        let is_read_only = self.read_only.as_ref().is_some_and(|range| range.contains(&slot));
        if is_read_only {
            protect(slot, libc::PROT_READ | libc::PROT_WRITE)?;
        }
        word.store(hook.own, Ordering::Relaxed);
        if is_read_only {
            protect(slot, libc::PROT_READ)?;
        }
        Ok(true)
    }
}

/// Changes the protection of the page with this address.
fn protect(address: usize, access: c_int) -> io::Result<()> {
    // SAFETY: takes a number only.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let page = std::ptr::with_exposed_provenance_mut(address & !(page_bytes - 1));
    // SAFETY: a page of an object's table of imports. Nobody writes there but this module, and the page stays
    // readable.
    match unsafe { libc::mprotect(page, page_bytes, access) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

//! Functions of a shared library that the caller's process may or may not have.
//!
//! The copy that the process already uses is tried first: an `ncclComm_t` or CUDA context of one copy is invalid in
//! another. Nothing is linked, so this library loads on every machine.
#![allow(unsafe_code)]

use crate::env;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::NonNull;

/// A loaded library. It stays loaded until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    /// The first argument of `dlsym`; `RTLD_DEFAULT` stands for the process's own symbols.
    handle: *mut c_void,
}

// SAFETY: a dlopen handle may be used from any thread, and it is never closed.
unsafe impl Send for Library {}
// SAFETY: as for Send; `dlsym` is thread-safe.
unsafe impl Sync for Library {}

impl Library {
    /// The library that exports `probe`: linked into the process, already loaded as `soname`, or
    /// found by the loader now. The error is the loader's text.
    pub(super) fn find(soname: &CStr, probe: &CStr) -> Result<Self, String> {
        if let Some(process) = Self::in_process(probe) {
            return Ok(process);
        }
        Self::open(soname, libc::RTLD_NOW | libc::RTLD_NOLOAD)
            .or_else(|| Self::open(soname, libc::RTLD_NOW | libc::RTLD_LOCAL))
            .ok_or_else(last_error)
    }

    /// The NCCL that `NCCL_EP_NCCL_LIBRARY` names, if it is set. It takes precedence over one that the process has made
    /// global: the Python package makes communicators with it. The error is the loader's text.
    pub(super) fn chosen_nccl() -> Option<Result<Self, String>> {
        let path = CString::new(env::nccl_library()?).ok()?;
        Some(Self::open(&path, libc::RTLD_NOW | libc::RTLD_LOCAL).ok_or_else(last_error))
    }

    pub(super) fn has(&self, name: &CStr) -> bool {
        self.symbol(name).is_some()
    }

    /// The process itself, if it exports `probe`.
    pub(super) fn in_process(probe: &CStr) -> Option<Self> {
        let process = Self { handle: libc::RTLD_DEFAULT };
        process.symbol(probe).is_some().then_some(process)
    }

    /// The object that defines `marker`, a symbol that some object of the process has made global.
    ///
    /// Unlike with [`Library::in_process`], all other names are looked up in that object first, even if an object
    /// loaded earlier defines them too: a Python process may hold PyTorch's CUDA runtime beside the CPU stand-ins.
    pub(super) fn defining(marker: &CStr) -> Option<Self> {
        let process = Self::in_process(marker)?;
        let Some(path) = object_of(process.symbol(marker)?.as_ptr()) else { return Some(process) };
        // dlopen has no name for the main program, which precedes all other objects anyway.
        Some(Self::open(path, libc::RTLD_NOW | libc::RTLD_NOLOAD).unwrap_or(process))
    }

    /// The function `name`, which ends in NUL.
    ///
    /// # Safety
    /// `F` is the type of a pointer to the function that the library documents under that name.
    pub(super) unsafe fn function<F: Copy>(&self, name: &'static str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.symbol(CStr::from_bytes_with_nul(name.as_bytes()).ok()?)?;
        // SAFETY: same size (asserted), and `F` fits the symbol (this function's contract).
        Some(unsafe { std::mem::transmute_copy::<NonNull<c_void>, F>(&address) })
    }

    fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is RTLD_DEFAULT or came from dlopen; `name` is NUL-terminated.
        NonNull::new(unsafe { libc::dlsym(self.handle, name.as_ptr()) })
    }

    fn open(soname: &CStr, flags: i32) -> Option<Self> {
        // SAFETY: `soname` is NUL-terminated. Loading runs the library's initialisers, as intended.
        let handle = unsafe { libc::dlopen(soname.as_ptr(), flags) };
        (!handle.is_null()).then_some(Self { handle })
    }
}

/// The loader's name of the object that contains `address`.
fn object_of(address: *const c_void) -> Option<&'static CStr> {
    let mut object = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: dladdr accepts any address; the result goes to an object of its type.
    if unsafe { libc::dladdr(address, object.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: dladdr succeeded, so it has written the object and given a name that lives as long as
    // the object is loaded; nothing is unloaded here.
    Some(unsafe { CStr::from_ptr(object.assume_init().dli_fname) })
}

/// The path of the file that `address` was loaded from, with symbolic links resolved if possible.
pub(super) fn file_of(address: *const c_void) -> Option<String> {
    let name = object_of(address)?.to_str().ok()?;
    Some(std::fs::canonicalize(name).ok().map_or(name.to_owned(), |path| path.display().to_string()))
}

/// The files in this process, other than `but`, that define `symbol` themselves.
pub(super) fn other_files_with(symbol: &CStr, but: &str) -> BTreeSet<String> {
    let mut names: Vec<CString> = Vec::new();
    // SAFETY: the callback gets `names`, which outlives the call, and nobody else uses it meanwhile.
    unsafe { libc::dl_iterate_phdr(Some(add_name), (&raw mut names).cast()) };
    let defined_in = |name: CString| {
        let library = Library::open(&name, libc::RTLD_LAZY | libc::RTLD_NOLOAD)?;
        let file = file_of(library.symbol(symbol)?.as_ptr())?;
        // dlsym also searches a library's dependencies.
        (std::fs::canonicalize(name.to_str().ok()?).ok()?.to_str()? == file).then_some(file)
    };
    names.into_iter().filter_map(defined_in).filter(|file| file != but).collect()
}

/// Adds the name of an object of the process to a `Vec<CString>`.
///
/// # Safety
/// For `dl_iterate_phdr` with such a vector as its data.
unsafe extern "C" fn add_name(object: *mut libc::dl_phdr_info, _: usize, names: *mut c_void) -> c_int {
    // SAFETY: `dl_iterate_phdr` gives a valid object, and our own data.
    let (name, names) = unsafe { ((*object).dlpi_name, &mut *names.cast::<Vec<CString>>()) };
    if !name.is_null() {
        // SAFETY: not NULL, so a string of the loader's.
        names.push(unsafe { CStr::from_ptr(name) }.to_owned());
    }
    0
}

/// The loader's text for this thread's last failure.
fn last_error() -> String {
    // SAFETY: no arguments; the result is NULL or a string of the loader's.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown loader error".to_owned();
    }
    // SAFETY: not NULL, NUL-terminated, and valid until this thread's next call to the loader.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A struct of C functions of one library, each looked up by its own name.
///
/// `load(&Library)` fails with the name of the first missing function; those listed under `optional` may be missing.
macro_rules! function_table {
    (
        $(#[$doc:meta])*
        $vis:vis struct $table:ident;
        required { $( fn $name:ident($($type:ty),*) -> $result:ty; )* }
        optional { $( fn $opt_name:ident($($opt_type:ty),*) -> $opt_result:ty; )* }
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case)] // C's names, so that they can be searched for.
        $vis struct $table {
            $( $vis $name: unsafe extern "C" fn($($type),*) -> $result, )*
            $( $vis $opt_name: Option<unsafe extern "C" fn($($opt_type),*) -> $opt_result>, )*
        }

        impl $table {
            fn load(library: &$crate::backend::dylib::Library) -> std::result::Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the signatures are those of the library's header.
                    $( $name: unsafe { library.function(concat!(stringify!($name), "\0")) }
                        .ok_or(stringify!($name))?, )*
                    // SAFETY: as above.
                    $( $opt_name: unsafe {
                        library.function(concat!(stringify!($opt_name), "\0"))
                    }, )*
                })
            }
        }
    };
}
pub(crate) use function_table;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processs_own_symbols_come_first() {
        let library = Library::find(c"no-such-library.so", c"malloc").unwrap();
        assert_eq!(library.handle, libc::RTLD_DEFAULT);
        assert!(library.symbol(c"malloc").is_some());
        assert!(library.symbol(c"no_such_symbol_at_all").is_none());
    }

    #[test]
    fn a_marker_leads_to_the_object_that_defines_it() {
        let library = Library::defining(c"dlsym").unwrap();
        assert_ne!(library.handle, libc::RTLD_DEFAULT);
        assert!(library.symbol(c"malloc").is_some());
        assert!(Library::defining(c"no_such_symbol_at_all").is_none());
    }

    #[test]
    fn a_symbol_is_found_in_the_file_that_defines_it() {
        let all = other_files_with(c"dlsym", "");
        assert_eq!(all.len(), 1, "{all:?}");
        assert!(other_files_with(c"dlsym", all.first().unwrap()).is_empty());
        assert!(other_files_with(c"no_such_symbol_at_all", "").is_empty());
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_it() {
        let error = Library::find(c"no-such-library.so", c"no_such_symbol_at_all").unwrap_err();
        assert!(error.contains("no-such-library.so"), "{error}");
    }
}

//! Named ranges on a profiler's host timeline, through NVTX's interface between programs and tools.
//!
//! A tool names its library in `NVTX_INJECTION64_PATH`. The first range loads the library, offers it tables of function
//! slots, and the tool fills the slots that it wants. Without a tool a range costs a look at a cell. The numbers are
//! those of NVTX 3's headers, with which `c_tests/nvtx` compares them.
#![allow(unsafe_code)]

use crate::env::Env;
use once_cell::sync::{Lazy, OnceCell};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The interface version that tools ask for.
const VERSION: u16 = 3;
/// Tables that a tool may ask for.
const CALLBACKS: c_uint = 1;
const VERSION_INFO: c_uint = 3;
/// Slots of each module's table; the first slot is unused.
const PLACES: [usize; 7] = [0, 16, 9, 15, 7, 16, 7];
const MOST_PLACES: usize = 16;
/// The module of domain functions, and the slots of those called here.
const DOMAINS: usize = 5;
const PUSH: usize = 4;
const POP: usize = 5;
const CREATE: usize = 12;

/// `nvtxEventAttributes_t`: a range with nothing but a name.
#[repr(C)]
struct Attributes {
    version: u16,
    size: u16,
    category: u32,
    color_type: i32,
    color: u32,
    payload_type: i32,
    reserved: i32,
    payload: u64,
    message_type: i32,
    message: *const c_char,
}
const _: () = assert!(size_of::<Attributes>() == 48);
const ASCII: i32 = 1;

type Function = *mut c_void;
type GetTable = extern "C" fn(c_uint) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetTable) -> c_int;
type Create = unsafe extern "C" fn(*const c_char) -> *mut c_void;
type Push = unsafe extern "C" fn(*mut c_void, *const Attributes) -> c_int;
type Pop = unsafe extern "C" fn(*mut c_void) -> c_int;

/// The slots that a tool fills with its functions.
static FUNCTIONS: [[AtomicPtr<c_void>; MOST_PLACES]; PLACES.len()] =
    [const { [const { AtomicPtr::new(null_mut()) }; MOST_PLACES] }; PLACES.len()];
/// The addresses of these slots by module, with NULL for the unused first slot and NULL behind the last.
static TABLES: Lazy<[[usize; MOST_PLACES + 1]; PLACES.len()]> = Lazy::new(|| {
    let mut tables = [[0; MOST_PLACES + 1]; PLACES.len()];
    for ((table, places), count) in tables.iter_mut().zip(&FUNCTIONS).zip(PLACES) {
        let named = table.iter_mut().zip(places).take(count).skip(1);
        named.for_each(|(to, place)| *to = place.as_ptr() as usize);
    }
    tables
});

#[repr(C)]
struct CallbackTable {
    size: usize,
    functions: unsafe extern "C" fn(c_uint, *mut *const usize, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionTable {
    size: usize,
    version: u32,
    reserved: u32,
    tell: extern "C" fn(u32),
}

/// Gives a tool the slots of a module's functions; returns 0 if there is no such module.
///
/// # Safety
/// The pointers are NULL or writable.
unsafe extern "C" fn functions_of(module: c_uint, table: *mut *const usize, size: *mut c_uint) -> c_int {
    let found = TABLES.get(module as usize).zip(PLACES.get(module as usize));
    let Some((places, &count)) = found.filter(|(_, count)| **count > 0) else { return 0 };
    if !table.is_null() {
        // SAFETY: not NULL, so by contract writable; the table lives as long as the process.
        unsafe { table.write(places.as_ptr()) };
    }
    if !size.is_null() {
        // SAFETY: as above.
        unsafe { size.write(count as c_uint) };
    }
    1
}

/// A tool reports its version, which makes no difference.
extern "C" fn hear(_version: u32) {}

/// Gives a tool the table `id`; NULL for unknown ids.
extern "C" fn table(id: c_uint) -> *const c_void {
    static CALLBACK_TABLE: CallbackTable = CallbackTable { size: size_of::<CallbackTable>(), functions: functions_of };
    static VERSION_TABLE: VersionTable =
        VersionTable { size: size_of::<VersionTable>(), version: VERSION as u32, reserved: 0, tell: hear };
    match id {
        CALLBACKS => (&raw const CALLBACK_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => null(),
    }
}

/// The functions of a tool that has attached itself.
struct Tool {
    domain: usize,
    push: Push,
    pop: Pop,
}

static TOOL: OnceCell<Option<Tool>> = OnceCell::new();

impl Tool {
    /// The tool that the environment names, if it listens for ranges.
    fn find() -> Option<Self> {
        let path = CString::new(Env::read().nvtx_injection?).ok()?;
        // SAFETY: NUL-terminated. The user asked for this library to run in the process.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_LAZY) };
        if library.is_null() {
            return None;
        }
        // SAFETY: a handle of dlopen's, and a NUL-terminated name.
        let entry = unsafe { libc::dlsym(library, c"InitializeInjectionNvtx2".as_ptr()) };
        if entry.is_null() {
            return None;
        }
        // SAFETY: a tool's function of this name has this type.
        let initialize = unsafe { std::mem::transmute::<Function, Initialize>(entry) };
        Self::attach(initialize)
    }

    /// Offers the tables to a tool.
    fn attach(initialize: Initialize) -> Option<Self> {
        // SAFETY: the argument is the callback that NVTX documents.
        if unsafe { initialize(table) } == 0 {
            return None;
        }
        let [create, push, pop] = [CREATE, PUSH, POP].map(|place| {
            let function = FUNCTIONS.get(DOMAINS)?.get(place)?.load(Ordering::Acquire);
            (!function.is_null()).then_some(function)
        });
        let domain = create.map_or(null_mut(), |create| {
            // SAFETY: this slot holds a function of this type.
            let create = unsafe { std::mem::transmute::<Function, Create>(create) };
            // SAFETY: a NUL-terminated name.
            unsafe { create(c"NCCL EP".as_ptr()) }
        });
        Some(Self {
            domain: domain as usize,
            // SAFETY: this slot holds a function of this type.
            push: unsafe { std::mem::transmute::<Function, Push>(push?) },
            // SAFETY: as above.
            pop: unsafe { std::mem::transmute::<Function, Pop>(pop?) },
        })
    }
}

/// A range that ends when this is dropped, on the thread that began it.
#[must_use]
pub struct Range(Option<&'static Tool>);

/// Begins a range, if a tool listens.
#[inline]
pub fn range(name: &str) -> Range {
    let tool = TOOL.get_or_init(Tool::find).as_ref();
    Range(tool.inspect(|tool| begin(tool, name)))
}

#[cold]
fn begin(tool: &Tool, name: &str) {
    let name = CString::new(name).unwrap_or_default();
    let attributes = Attributes {
        version: VERSION,
        size: size_of::<Attributes>() as u16,
        category: 0,
        color_type: 0,
        color: 0,
        payload_type: 0,
        reserved: 0,
        payload: 0,
        message_type: ASCII,
        message: name.as_ptr(),
    };
    // SAFETY: the tool copies what it keeps; name and attributes outlive the call.
    unsafe { (tool.push)(tool.domain as *mut c_void, &attributes) };
}

impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if let Some(tool) = self.0 {
            // SAFETY: ends the range that this thread began last.
            unsafe { (tool.pop)(tool.domain as *mut c_void) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_is_shown_every_module() {
        for (module, &count) in PLACES.iter().enumerate() {
            let (mut places, mut size) = (null(), 0);
            // SAFETY: both are writable.
            let found = unsafe { functions_of(module as c_uint, &mut places, &mut size) };
            assert_eq!((found, size as usize), (c_int::from(count > 0), count));
        }
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { functions_of(7, null_mut(), null_mut()) }, 0);
        assert!(table(2).is_null() && !table(VERSION_INFO).is_null());
    }

    #[test]
    fn without_a_tool_nothing_happens() {
        unsafe extern "C" fn refuse(_table: GetTable) -> c_int {
            0
        }
        assert!(Tool::attach(refuse).is_none());
        drop(range("a range of a test"));
    }
}

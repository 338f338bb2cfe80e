//! Compiles every `.cu` file below `cuda/` to its own fatbin; the library embeds all of them.
//!
//! Several are compiled at a time, and each one again only if its sources, the compiler or the options have changed,
//! whatever made cargo run this: next to each fatbin is a record of everything it was made from.
//!
//! Without nvcc the build continues with only the host backend and says so once; `NCCL_EP_CUDA=require` makes that an
//! error, `NCCL_EP_CUDA=off` makes it silent. A failing nvcc is always an error: whoever has one expects kernels.
//! `cuda/params` generates the headers of the kernels' parameters.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Where `make` installs the pinned compiler wheels.
const PINNED_TOOLKIT: &str = ".deps/cuda/nvidia/cu13";

/// The default of `NCCL_EP_ARCHS`. Newer GPUs run the PTX of the newest entry that has it; `?` marks an architecture
/// that an older nvcc may not know.
const DEFAULT_ARCHS: &str = "80,90+ptx,100?";

/// The first release whose nvcc knows every architecture above.
const OLDEST: (u32, u32) = (12, 8);

/// Variables that lead to nvcc if `NVCC` does not. `scripts/env.sh` sets `NVCC`, so that a virtual environment, which
/// changes `PATH`, causes no rebuild.
const SEARCHED: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "PATH"];

fn main() -> ExitCode {
    println!("cargo::rustc-check-cfg=cfg(nccl_ep_cuda)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cuda");
    match cuda_version() {
        Ok(version) => {
            // The ABIs' build scripts read this.
            println!("cargo::metadata=cuda_version={version}");
            ExitCode::SUCCESS
        }
        Err(message) => {
            say("error", &message);
            ExitCode::FAILURE
        }
    }
}

/// Embeds the kernels as `NCCL_EP_CUDA` asks; returns the CUDA version that built them, or `none`.
fn cuda_version() -> Result<String, String> {
    let mode = read("NCCL_EP_CUDA").unwrap_or_else(|| "auto".into());
    let mode = mode.to_string_lossy();
    if !["auto", "off", "require"].contains(&&*mode) {
        return Err(format!("NCCL_EP_CUDA: must be auto, off or require (got {mode})"));
    }
    if mode == "off" {
        return Ok("none".to_owned());
    }
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    if let Some(nvcc) = Nvcc::find(&root)? {
        return embed_kernels(&nvcc, &root)
            .map_err(|reason| format!("{reason}\n(NCCL_EP_CUDA=off builds without the kernels)"));
    }
    let missing = format!(
        "no nvcc (looked at NVCC, CUDA_HOME, CUDA_PATH, PATH, {PINNED_TOOLKIT} and \
         /usr/local/cuda; `make` installs a pinned one; NCCL_EP_CUDA=off silences this)"
    );
    if mode == "require" {
        return Err(format!("NCCL_EP_CUDA=require: {missing}"));
    }
    // Told of a file that is not there yet, cargo would compile everything anew each time.
    say("warning", &format!("built without the CUDA backend: {missing}; if one comes, NCCL_EP_CUDA=require finds it"));
    Ok("none".to_owned())
}

/// Compiles all kernels and passes the list of their fatbins to rustc; returns the CUDA version.
fn embed_kernels(nvcc: &Nvcc, root: &Path) -> Result<String, String> {
    let folder = root.join("cuda");
    let mut files = Vec::new();
    find_kernels(&folder, &mut files)?;
    files.sort();
    let out = PathBuf::from(variable("OUT_DIR")?);
    let mut units: Vec<Unit> =
        files.iter().map(|file| Unit::new(file, &folder, &out, nvcc)).collect::<Result<_, _>>()?;
    // Longest compilations first.
    units.sort_by_key(|unit| Reverse(unit.inputs.len()));
    compile(&units, nvcc)?;
    let images: Vec<String> =
        units.iter().map(|unit| format!("&Aligned(*include_bytes!({:?}))", unit.fatbin)).collect();
    let list = out.join("kernels.rs");
    write(&list, &format!("[{}]", images.join(", ")))?;
    println!("cargo::rustc-cfg=nccl_ep_cuda");
    println!("cargo::rustc-env=NCCL_EP_KERNELS={}", list.display());
    Ok(format!("{}.{}", nvcc.version.0, nvcc.version.1))
}

/// Compiles the stale ones among `units`, some at a time.
fn compile(units: &[Unit], nvcc: &Nvcc) -> Result<(), String> {
    let stale: Vec<&Unit> = units.iter().filter(|unit| !unit.is_current()).collect();
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok());
    let next = AtomicUsize::new(0);
    let work = || -> Result<(), String> {
        while let Some(unit) = stale.get(next.fetch_add(1, Ordering::Relaxed)) {
            unit.compile(nvcc)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers = jobs.unwrap_or(1).clamp(1, stale.len().max(1));
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().map_err(|_| "a thread of build.rs failed".to_owned())?)
    })
}

/// A kernel file and its outputs.
struct Unit {
    source: PathBuf,
    fatbin: PathBuf,
    /// Written with `inputs` once the fatbin is complete.
    record: PathBuf,
    /// The compiler, its options and the text of all sources.
    inputs: String,
}

impl Unit {
    fn new(source: &Path, folder: &Path, out: &Path, nvcc: &Nvcc) -> Result<Self, String> {
        let name = source.strip_prefix(folder).unwrap_or(source).with_extension("");
        let name = name.to_string_lossy().replace('/', "_");
        let mut files = BTreeSet::new();
        find_sources(source, nvcc.params.as_deref(), &mut files)?;
        let mut inputs = format!("{} {}\n", nvcc.banner, nvcc.options.join(" "));
        for file in &files {
            let _ = writeln!(inputs, "// {}\n{}", file.display(), text_of(file)?);
        }
        Ok(Self {
            source: source.to_owned(),
            fatbin: out.join(format!("{name}.fatbin")),
            record: out.join(format!("{name}.inputs")),
            inputs,
        })
    }

    fn is_current(&self) -> bool {
        self.fatbin.is_file() && fs::read_to_string(&self.record).is_ok_and(|it| it == self.inputs)
    }

    fn compile(&self, nvcc: &Nvcc) -> Result<(), String> {
        let _ = fs::remove_file(&self.record);
        let mut command = Command::new(&nvcc.path);
        command.args(&nvcc.options).arg("-o").arg(&self.fatbin);
        if let Some(params) = &nvcc.params {
            command.arg("-I").arg(params);
        }
        run(command.arg(&self.source))?;
        write(&self.record, &self.inputs)
    }
}

/// Adds `file` and the project's files that it includes, beside it or below `params`.
fn find_sources(file: &Path, params: Option<&Path>, files: &mut BTreeSet<PathBuf>) -> Result<(), String> {
    let file = fs::canonicalize(file).map_err(|error| format!("cannot find {}: {error}", file.display()))?;
    if !files.insert(file.clone()) {
        return Ok(());
    }
    for line in text_of(&file)?.lines() {
        let included = line.strip_prefix("#include \"").and_then(|it| it.split('"').next());
        if let Some(included) = included {
            let beside = file.with_file_name(included);
            let made = params.map(|folder| folder.join(included));
            let found = made.filter(|made| made.is_file()).unwrap_or(beside);
            find_sources(&found, params, files)?;
        }
    }
    Ok(())
}

/// Adds every kernel file below `folder`.
fn find_kernels(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let unlisted = |error| format!("cannot list {}: {error}", folder.display());
    for entry in fs::read_dir(folder).map_err(unlisted)? {
        let path = entry.map_err(unlisted)?.path();
        if path.is_dir() {
            find_kernels(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "cu") {
            files.push(path);
        }
    }
    Ok(())
}

/// The compiler found on this machine.
struct Nvcc {
    path: PathBuf,
    version: (u32, u32),
    /// The output of `--version`, which identifies the build.
    banner: String,
    options: Vec<String>,
    /// The folder whose `params` has the parameters' headers.
    params: Option<PathBuf>,
}

impl Nvcc {
    /// The first nvcc that exists, in the documented order.
    fn find(root: &Path) -> Result<Option<Self>, String> {
        let named = read("NVCC").map(PathBuf::from);
        let places = match named {
            Some(named) if !named.is_file() => {
                let named = named.display();
                return Err(format!("NVCC: must be the path of a file (got {named})"));
            }
            Some(named) => vec![named],
            None => candidates(root),
        };
        let Some(path) = places.into_iter().find(|path| path.is_file()) else { return Ok(None) };
        println!("cargo::rerun-if-changed={}", path.display());
        let banner = run(Command::new(&path).arg("--version"))?;
        let version =
            parse_version(&banner).ok_or_else(|| format!("{} --version names no release: {banner}", path.display()))?;
        if version < OLDEST {
            let (path, (major, minor)) = (path.display(), version);
            let (oldest, beside) = OLDEST;
            return Err(format!(
                "{path} is of CUDA {major}.{minor}, and {oldest}.{beside} is the oldest that suits: set CUDA_HOME \
                 to a newer one (NCCL_EP_CUDA=off builds without the kernels)"
            ));
        }
        let params = env::var_os("DEP_NCCL_EP_PARAMS_INCLUDE").map(PathBuf::from);
        let options = options(&path, version)?;
        Ok(Some(Self { path, version, banner, options, params }))
    }
}

/// The options of nvcc for every file.
fn options(nvcc: &Path, version: (u32, u32)) -> Result<Vec<String>, String> {
    let mut options: Vec<String> = ["-std=c++17", "-O3", "--fatbin", "--threads=2"].map(str::to_owned).into();
    if version.0 >= 13 {
        // Older compilers lack the option; it only makes images smaller.
        options.push("--compress-mode=size".to_owned());
    }
    options.extend(gencode(nvcc)?);
    Ok(options)
}

/// The `-gencode` options. One entry yields machine code and, with `+ptx`, portable code from a single front-end pass.
fn gencode(nvcc: &Path) -> Result<Vec<String>, String> {
    let known = run(Command::new(nvcc).arg("--list-gpu-arch"))?;
    let is_known = |arch: &str| known.lines().any(|line| line == format!("compute_{arch}"));
    let archs = read("NCCL_EP_ARCHS").unwrap_or_else(|| DEFAULT_ARCHS.into());
    let archs = archs.to_string_lossy();
    let mut options = Vec::new();
    for entry in archs.split([',', ' ']).filter(|entry| !entry.is_empty()) {
        let (entry, optional) = strip(entry, "?");
        let (arch, ptx) = strip(entry, "+ptx");
        if optional && !is_known(arch) {
            continue;
        }
        let ptx = if ptx { format!(",compute_{arch}") } else { String::new() };
        options.push(format!("-gencode=arch=compute_{arch},code=[sm_{arch}{ptx}]"));
    }
    if options.is_empty() { Err(format!("NCCL_EP_ARCHS: names no architecture (got {archs})")) } else { Ok(options) }
}

/// Possible locations of nvcc if `NVCC` names none, best first.
fn candidates(root: &Path) -> Vec<PathBuf> {
    let [home, other_home, path] = SEARCHED.map(|name| read(name).unwrap_or_default());
    let mut found: Vec<PathBuf> = [home, other_home]
        .into_iter()
        .filter(|home| !home.is_empty())
        .map(|home| PathBuf::from(home).join("bin/nvcc"))
        .collect();
    found.extend(env::split_paths(&path).map(|folder| folder.join("nvcc")));
    found.push(root.join(PINNED_TOOLKIT).join("bin/nvcc"));
    found.push(PathBuf::from("/usr/local/cuda/bin/nvcc"));
    found
}

/// `(13, 0)` from a line that says `release 13.0`.
fn parse_version(banner: &str) -> Option<(u32, u32)> {
    let (_, tail) = banner.split_once("release ")?;
    let (major, tail) = tail.split_once('.')?;
    let minor: String = tail.chars().take_while(char::is_ascii_digit).collect();
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// `text` without `suffix`, and whether it was there.
fn strip<'a>(text: &'a str, suffix: &str) -> (&'a str, bool) {
    text.strip_suffix(suffix).map_or((text, false), |rest| (rest, true))
}

/// Standard output of a command that must succeed.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?} failed ({}):\n{complaint}", output.status))
}

fn text_of(file: &Path) -> Result<String, String> {
    fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// A variable of the user's; cargo runs this script again if it changes.
fn read(name: &str) -> Option<OsString> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var_os(name)
}

/// A variable that cargo sets for build scripts.
fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}

/// Prints `message` through cargo, which takes one line at a time.
fn say(level: &str, message: &str) {
    for line in message.lines().filter(|line| !line.is_empty()) {
        println!("cargo::{level}={line}");
    }
}

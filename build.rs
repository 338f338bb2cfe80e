//! Compiles every `.cu` file below `cuda/` to one fatbin that the library embeds.
//!
//! Without nvcc the build continues with the host backend alone and says so once;
//! `NCCL_EP_CUDA=require` makes that an error, `NCCL_EP_CUDA=off` makes it silent. A failing nvcc
//! is always an error: whoever has one expects kernels. Headers are not generated here: they are
//! committed, and tests compare them.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Where `make` installs the pinned compiler wheels.
const PINNED_TOOLKIT: &str = ".deps/cuda/nvidia/cu13";

/// The default of `NCCL_EP_ARCHS`. Newer chips run the PTX of the newest entry that has it; `?`
/// marks an architecture that an older nvcc may not know.
const DEFAULT_ARCHS: &str = "80,90+ptx,100?";

/// The first release whose nvcc knows every architecture above.
const OLDEST: (u32, u32) = (12, 8);

/// All environment variables that this script reads.
const VARIABLES: [&str; 6] = [
    "NCCL_EP_CUDA",
    "NCCL_EP_ARCHS",
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "PATH",
];

fn main() -> ExitCode {
    println!("cargo::rustc-check-cfg=cfg(nccl_ep_cuda)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=cuda");
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
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
    let mode = env::var("NCCL_EP_CUDA").unwrap_or_else(|_| "auto".to_owned());
    if !["auto", "off", "require"].contains(&mode.as_str()) {
        return Err(format!(
            "NCCL_EP_CUDA: must be auto, off or require (got {mode})"
        ));
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
    say(
        "warning",
        &format!("built without the CUDA backend: {missing}"),
    );
    Ok("none".to_owned())
}

/// Compiles all kernels and passes their path to rustc; returns the CUDA version.
fn embed_kernels(nvcc: &Nvcc, root: &Path) -> Result<String, String> {
    let out = PathBuf::from(variable("OUT_DIR")?);
    let unit = write_unit(&root.join("cuda"), &out)?;
    let fatbin = out.join("kernels.fatbin");
    nvcc.compile(&unit, &fatbin)?;
    println!("cargo::rustc-cfg=nccl_ep_cuda");
    println!("cargo::rustc-env=NCCL_EP_FATBIN={}", fatbin.display());
    Ok(format!("{}.{}", nvcc.version.0, nvcc.version.1))
}

/// Writes one translation unit that includes every kernel file: a fatbin holds one image per
/// architecture, so all kernels must be in it.
fn write_unit(kernels: &Path, out: &Path) -> Result<PathBuf, String> {
    let mut files = Vec::new();
    find_kernels(kernels, &mut files)?;
    files.sort();
    let text: String = files
        .iter()
        .map(|file| format!("#include \"{}\"\n", file.display()))
        .collect();
    let unit = out.join("kernels.cu");
    std::fs::write(&unit, text)
        .map_err(|error| format!("cannot write {}: {error}", unit.display()))?;
    Ok(unit)
}

/// Adds every kernel file below `folder`.
fn find_kernels(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), String> {
    let unlisted = |error| format!("cannot list {}: {error}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(unlisted)? {
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
}

impl Nvcc {
    /// The first nvcc that exists, in the documented order.
    fn find(root: &Path) -> Result<Option<Self>, String> {
        if let Some(named) = env::var_os("NVCC").filter(|named| !Path::new(named).is_file()) {
            return Err(format!(
                "NVCC: must be the path of a file (got {})",
                named.display()
            ));
        }
        let Some(path) = candidates(root).into_iter().find(|path| path.is_file()) else {
            return Ok(None);
        };
        println!("cargo::rerun-if-changed={}", path.display());
        let banner = run(Command::new(&path).arg("--version"))?;
        let version = parse_version(&banner)
            .ok_or_else(|| format!("{} --version names no release: {banner}", path.display()))?;
        if version < OLDEST {
            let (path, (major, minor)) = (path.display(), version);
            let (oldest, beside) = OLDEST;
            return Err(format!(
                "{path} is of CUDA {major}.{minor}, and {oldest}.{beside} is the oldest that suits: set CUDA_HOME \
                 to a newer one (NCCL_EP_CUDA=off builds without the kernels)"
            ));
        }
        Ok(Some(Self { path, version }))
    }

    /// Compiles `unit` for every architecture of `NCCL_EP_ARCHS`.
    fn compile(&self, unit: &Path, fatbin: &Path) -> Result<(), String> {
        let mut command = Command::new(&self.path);
        command.args(["-std=c++17", "-O3", "--fatbin", "--threads=2"]);
        if self.version.0 >= 13 {
            // Older compilers lack the option; it only makes images smaller.
            command.arg("--compress-mode=size");
        }
        command
            .args(self.gencode()?)
            .arg("-o")
            .arg(fatbin)
            .arg(unit);
        run(&mut command).map(drop)
    }

    /// The `-gencode` options. One entry yields machine code and, with `+ptx`, portable code from a
    /// single front-end pass.
    fn gencode(&self) -> Result<Vec<String>, String> {
        let known = run(Command::new(&self.path).arg("--list-gpu-arch"))?;
        let is_known = |arch: &str| known.lines().any(|line| line == format!("compute_{arch}"));
        let archs = env::var("NCCL_EP_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHS.to_owned());
        let mut options = Vec::new();
        for entry in archs.split([',', ' ']).filter(|entry| !entry.is_empty()) {
            let (entry, optional) = strip(entry, "?");
            let (arch, ptx) = strip(entry, "+ptx");
            if optional && !is_known(arch) {
                continue;
            }
            let ptx = if ptx {
                format!(",compute_{arch}")
            } else {
                String::new()
            };
            options.push(format!(
                "-gencode=arch=compute_{arch},code=[sm_{arch}{ptx}]"
            ));
        }
        if options.is_empty() {
            return Err(format!(
                "NCCL_EP_ARCHS: names no architecture (got {archs})"
            ));
        }
        Ok(options)
    }
}

/// Possible places of nvcc, best first.
fn candidates(root: &Path) -> Vec<PathBuf> {
    let toolkits = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os);
    let path = env::var_os("PATH").unwrap_or_default();
    let mut found: Vec<PathBuf> = env::var_os("NVCC").into_iter().map(PathBuf::from).collect();
    found.extend(toolkits.map(|home| PathBuf::from(home).join("bin/nvcc")));
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
    text.strip_suffix(suffix)
        .map_or((text, false), |rest| (rest, true))
}

/// Standard output of a command that must succeed.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command
        .output()
        .map_err(|error| format!("cannot run {command:?}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{command:?} failed ({}):\n{complaint}",
        output.status
    ))
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

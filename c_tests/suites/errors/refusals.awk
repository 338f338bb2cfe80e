# The rows of the tables of docs/errors.md as initialisers of Refusal (refusals.c).
BEGIN { FS = " *[|] *" }
/^## / {
    split($0, words, /[ ,]+/)
    name = words[2] ~ /^ncclEp/ ? words[2] : /while they run/ ? "ncclEpGetAsyncError: {operation}" : "{function}"
}
$2 ~ /^[a-z0-9]+(-[a-z0-9]+)+$/ && NF == 7 {
    gsub(/`/, "", $3)
    printf "{\"%s\", \"%s\", \"%s\", \"%s\", %s, \"%s\"},\n", $2, name, $3, $4, $5 ~ /^nccl/ ? $5 : "kOwnResult", $6
}

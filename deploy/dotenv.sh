#!/bin/sh
# Writes .env from .env.example, with new random passwords, readable by its owner alone: sh deploy/dotenv.sh
set -eu
cd "$(dirname "$0")/.."
umask 077
if [ -e .env ]; then
    echo "dotenv: expected no .env in $PWD, found one; keep it: the volumes were made with its passwords" >&2
    exit 2
fi

values=$(while IFS= read -r line; do
    case $line in
        AIRFLOW_FERNET_KEY=) printf '%s%s\n' "$line" "$(head -c 32 /dev/urandom | base64 | tr '+/' '-_')" ;;
        [A-Z]*=) printf '%s%s\n' "$line" "$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')" ;;
        *) printf '%s\n' "$line" ;;
    esac
done <.env.example)
printf '%s\n' "$values" >.env
echo "wrote $PWD/.env"
if git rev-parse --is-inside-work-tree >/dev/null 2>&1 && ! git check-ignore --quiet .env; then
    echo "dotenv: git does not ignore .env, which has passwords: add it to .gitignore" >&2
fi
